// Builds that check every structure after each change: how often they do, and what they do about an error.
#ifndef TORCH_UVM_CHECKED
#define TORCH_UVM_CHECKED // for this file only: an unchecked build contains the code too
#endif
#include "allocator/invariants.h"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <new>

#include "harness.h"

using namespace torch_uvm;

namespace {

struct Structure {
  std::optional<std::string> wrong;
  mutable int walks = 0;
  std::optional<std::string> check() const {
    ++walks;
    return wrong;
  }
};

/// Runs a body in a child. Returns its output on stderr and the signal that ended it; 0: none.
template <typename Body>
std::pair<std::string, int> in_a_child(Body body) {
  std::array<int, 2> ends{};
  CHECK(pipe(ends.data()) == 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    body();
    _exit(0);
  }
  close(ends[1]);
  std::string said;
  std::array<char, 256> some{};
  for (ssize_t got = 0; (got = read(ends[0], some.data(), some.size())) > 0;) {
    said.append(some.data(), static_cast<std::size_t>(got));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return {said, WIFSIGNALED(status) ? WTERMSIG(status) : 0};
}

} // namespace

TEST(what_code_relies_on_is_checked_where_it_does) {
  const auto [nothing, none] = in_a_child([] { expect(true, "the record has a block"); });
  CHECK(nothing.empty() && none == 0);
  const auto [said, signal] = in_a_child([] { expect(false, "the record has a block"); });
  CHECK_EQ(said, "torch_uvm: an invariant does not hold: the record has a block\n");
  CHECK_EQ(signal, SIGABRT);
}

TEST(a_valid_structure_is_checked_without_effect) {
  Structure structure;
  {
    const WalkAfterwards walk(structure);
  }
  try {
    const WalkAfterwards walk(structure);
    throw 1;
  } catch (int) {
  }
  CHECK_EQ(structure.walks, 2);
}

TEST(a_broken_structure_aborts_with_a_message) {
  const Structure structure{"two of them are one"};
  const auto [said, signal] = in_a_child([&] { const WalkAfterwards walk(structure); });
  CHECK_EQ(signal, SIGABRT);
  CHECK(said.find("an invariant does not hold: two of them are one") != std::string::npos);
}

TEST(a_check_without_memory_reports_nothing) {
  int tries = 0;
  walk_if_due([&]() -> std::optional<std::string> {
    ++tries;
    throw std::bad_alloc();
  });
  CHECK_EQ(tries, 1);
}

TEST(the_environment_sets_the_frequency_of_checks) {
  const auto [said, signal] = in_a_child([] {
    execl("/proc/self/exe", "test_invariants", "changes", nullptr); // the variable is read once in each process
  });
  CHECK_EQ(signal, 0);
  CHECK_EQ(said, "4 walks of 10\n");
}

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "changes") {
    setenv("TORCH_UVM_CHECK_EVERY", "3", 1);
    Structure structure;
    for (int i = 0; i < 10; ++i) {
      const WalkAfterwards walk(structure);
    }
    std::fprintf(stderr, "%d walks of 10\n", structure.walks);
    return 0;
  }
  unsetenv("TORCH_UVM_CHECK_EVERY");
  return harness::run(argc, argv);
}
