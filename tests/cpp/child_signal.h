// Runs what may end a process in a child.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>

/// The signal that ends a child process which does this; 0: it returned.
inline int signal_of(const std::function<void()>& action) {
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL); // a sanitizer's handler would exit instead
    action();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}
