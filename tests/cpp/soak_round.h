// A round of the soak test: a fresh subject and some thousand operations on it by several threads. It runs in a process
// of its own, so that a crash and a hang are ordinary failures. A failing round is repeated by one thread in the
// recorded order and, if it fails again, minimised.
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "delta_debugging.h"
#include "soak_player.h"
#include "soak_targets.h"

namespace soak {

using Operations = std::vector<Operation>;
/// Wraps a target's subject; for tests of the soak test itself.
using Wrap = std::function<std::unique_ptr<Subject>(std::unique_ptr<Subject>)>;

struct Plan {
  std::uint64_t seed = 0;
  unsigned threads = 8;
  std::size_t operations = 0; ///< of each thread
  std::size_t walk_every = 5000; ///< operations of a thread between two checks of the invariants
  unsigned seconds = 300; ///< a round that takes longer counts as hanging
  Wrap wrap;
};

/// A round's report to the process that started it; readable after a crash too.
struct Report {
  std::atomic<std::uint64_t> begun; ///< number of begun operations
  std::atomic<std::uint64_t> refused;
  std::atomic<std::uint64_t> made_room;
  char what[512];
  std::uint8_t order[1]; ///< for each begun operation, its thread + 1; 0: the crash came before the entry was written
};

/// Memory that a forked child writes and its parent reads.
class SharedReport {
 public:
  explicit SharedReport(std::size_t operations) : bytes_(sizeof(Report) + operations) {
    void* const made = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) {
      throw std::bad_alloc();
    }
    report_ = static_cast<Report*>(made);
  }
  ~SharedReport() {
    munmap(report_, bytes_);
  }
  SharedReport(const SharedReport&) = delete;
  SharedReport& operator=(const SharedReport&) = delete;
  Report* operator->() const {
    return report_;
  }
  Report& operator*() const {
    return *report_;
  }

 private:
  std::size_t bytes_;
  Report* report_;
};

inline std::unique_ptr<ManagedRuntime> runtime_of(const Target& target, std::uint64_t seed) {
  EmulatedConfig config;
  config.devices = kDevices;
  if (target.delayed) {
    config.schedule_seed = seed;
  }
  return std::make_unique<EmulatedRuntime>(config);
}

inline std::unique_ptr<Subject> subject_of(const Target& target, const Plan& plan, ManagedRuntime& runtime) {
  std::unique_ptr<Subject> made = target.make(runtime);
  return plan.wrap ? plan.wrap(std::move(made)) : std::move(made);
}

inline std::vector<Operations> operations_of(const Plan& plan) {
  std::vector<Operations> all(plan.threads);
  for (unsigned thread = 0; thread < plan.threads; ++thread) {
    Generator generator(plan.seed, static_cast<std::uint8_t>(thread));
    for (std::size_t i = 0; i < plan.operations; ++i) {
      all[thread].push_back(generator.next());
    }
  }
  return all;
}

/// Plays all threads concurrently, in this process.
inline void play_threads(const Target& target, const Plan& plan, Report& report) {
  const std::vector<Operations> all = operations_of(plan);
  const auto runtime = runtime_of(target, plan.seed);
  const auto subject = subject_of(target, plan, *runtime);
  Table table(*subject, plan.threads);
  std::atomic<bool> failed{false};
  std::mutex first;
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < plan.threads; ++thread) {
    threads.emplace_back([&, thread] {
      try {
        for (std::size_t i = 0; i < all[thread].size() && !failed; ++i) {
          report.order[report.begun++] = static_cast<std::uint8_t>(thread + 1);
          table.play(all[thread][i]);
          if ((i + 1) % plan.walk_every == 0) {
            table.walk(); // concurrently with the other threads' operations
          }
        }
      } catch (const std::exception& error) {
        const std::lock_guard lock(first);
        if (!failed.exchange(true)) {
          std::snprintf(report.what, sizeof report.what, "%s", error.what());
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  report.refused = table.refused.load();
  report.made_room = table.made_room.load();
  if (failed) {
    std::_Exit(1); // the process is not usable after a failure
  }
  table.finish();
}

/// Plays operations on one thread. The fewer operations there are, the more often it checks the invariants.
inline void play_alone(const Target& target, const Plan& plan, const Operations& operations) {
  const auto runtime = runtime_of(target, plan.seed);
  const auto subject = subject_of(target, plan, *runtime);
  Table table(*subject, plan.threads);
  const std::size_t every = std::max<std::size_t>(operations.size() / 2000, 1);
  for (std::size_t i = 0; i < operations.size(); ++i) {
    table.play(operations[i]);
    if ((i + 1) % every == 0) {
      table.walk();
    }
  }
  table.finish();
}

/// Runs a function in a forked child.
/// \return a description of the failure; empty: it succeeded
inline std::string in_a_child(unsigned seconds, Report& report, const std::function<void()>& body) {
  std::fflush(nullptr);
  report.what[0] = '\0';
  const pid_t child = fork();
  if (child < 0) {
    return "no process could be forked";
  }
  if (child == 0) {
    alarm(seconds);
    try {
      body();
    } catch (const std::exception& error) {
      std::snprintf(report.what, sizeof report.what, "%s", error.what());
      std::_Exit(1);
    }
    std::_Exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) {
    return WTERMSIG(status) == SIGALRM ? "it hung for " + std::to_string(seconds) + " s"
                                       : std::string("it was ended by ") + strsignal(WTERMSIG(status));
  }
  if (WEXITSTATUS(status) == 0) {
    return {};
  }
  return report.what[0] != '\0' ? report.what : "exit status " + std::to_string(WEXITSTATUS(status));
}

/// The begun operations of all threads, in the order in which they began.
inline Operations in_order(const Plan& plan, const Report& report) {
  const std::vector<Operations> all = operations_of(plan);
  std::vector<std::size_t> next(plan.threads, 0);
  Operations merged;
  for (std::uint64_t i = 0; i < report.begun; ++i) {
    if (report.order[i] != 0) {
      const std::size_t thread = report.order[i] - 1U;
      merged.push_back(all[thread][next[thread]++]);
    }
  }
  return merged;
}

struct Outcome {
  std::string wrong; ///< empty: the round succeeded
  std::uint64_t operations = 0, refused = 0, made_room = 0;
  /// Whether the operations fail reproducibly when one thread plays them. Operations of several threads may not: they
  /// overlap, and are repeated in the order in which they began.
  bool fails_alone = false;
  Operations least; ///< the minimised failing operations; empty: the failure could not be reproduced
};

/// Finds and prints the shortest sequence that fails on one thread. If there is none, prints the last operations of all
/// threads.
inline void explain(const Target& target, const Plan& plan, const Report& failed, unsigned most_seconds,
                    Outcome& outcome) {
  const Operations merged = in_order(plan, failed);
  const SharedReport report(1);
  std::string why;
  const auto fails = [&](const Operations& operations) {
    why = in_a_child(plan.seconds, *report, [&] { play_alone(target, plan, operations); });
    return !why.empty();
  };
  if (!fails(merged)) {
    std::printf("  played again by one thread it does not fail. The last operations that were begun:\n");
    for (std::size_t i = merged.size() - std::min<std::size_t>(merged.size(), 32); i < merged.size(); ++i) {
      std::printf("    %s\n", to_string(merged[i]).c_str());
    }
    return;
  }
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::seconds(most_seconds);
  outcome.least = minimise<Operation>(merged, fails, [&] { return Clock::now() > end; });
  outcome.fails_alone = fails(outcome.least);
  std::printf("  %zu operations minimised to %zu, which fail alone%s%s\n", merged.size(), outcome.least.size(),
              outcome.fails_alone ? ": " : ", but not each time", why.c_str());
  for (const Operation& operation : outcome.least) {
    std::printf("    %s\n", to_string(operation).c_str());
  }
}

inline Outcome run_round(const Target& target, const Plan& plan, unsigned seconds_to_explain = 300) {
  const SharedReport report(plan.threads * plan.operations);
  Outcome outcome;
  outcome.wrong = in_a_child(plan.seconds, *report, [&] { play_threads(target, plan, *report); });
  outcome.operations = report->begun;
  outcome.refused = report->refused;
  outcome.made_room = report->made_room;
  if (!outcome.wrong.empty()) {
    std::printf("FAILED round of seed %llu, %s%s: %s\n", static_cast<unsigned long long>(plan.seed),
                target.name.c_str(), target.delayed ? ", delayed" : "", outcome.wrong.c_str());
    explain(target, plan, *report, seconds_to_explain, outcome);
    std::fflush(stdout);
  }
  return outcome;
}

} // namespace soak
