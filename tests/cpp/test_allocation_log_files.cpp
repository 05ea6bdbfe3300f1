// Log files: paths that cannot be opened, full disks, forked children.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <vector>

#include "log_rig.h"

using namespace logs;

TEST(a_file_that_cannot_be_created_is_refused_by_name) {
  try {
    AllocationLog log("/no such folder/log.csv");
    harness::fail(__FILE__, __LINE__, "it was made");
  } catch (const InvalidArgument& error) {
    CHECK(std::string(error.what()).find("/no such folder/log.csv") != std::string::npos);
  }
}

TEST(a_full_disk_is_reported_at_the_end_and_stops_nothing) {
  for (const std::uint64_t count : {std::uint64_t{1}, std::uint64_t{3} * AllocationLog::kBlockRows}) {
    AllocationLog log("/dev/full");
    for (std::uint64_t number = 0; number < count; ++number) {
      log.allocated(&log, number, kStream);
    }
    const AllocationLogEnd end = log.close();
    CHECK(end.error.find("/dev/full") != std::string::npos);
    CHECK(end.error.find("No space left") != std::string::npos);
    CHECK_EQ(end.rows, std::uint64_t{0});
    CHECK_EQ(end.lost, count);
  }
}

TEST(a_disk_that_becomes_full_leaves_only_complete_rows) {
  const ScratchFile file;
  struct sigaction before{};
  struct sigaction ignore{};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGXFSZ, &ignore, &before);
  rlimit limit{};
  ::getrlimit(RLIMIT_FSIZE, &limit);
  rlimit little = limit;
  little.rlim_cur = 100'001;
  ::setrlimit(RLIMIT_FSIZE, &little);
  AllocationLog log(file.path());
  constexpr std::uint64_t kRows = 10000;
  for (std::uint64_t number = 0; number < kRows; ++number) {
    log.allocated(&log, number, kStream);
  }
  const AllocationLogEnd end = log.close();
  ::setrlimit(RLIMIT_FSIZE, &limit);
  ::sigaction(SIGXFSZ, &before, nullptr);
  CHECK(end.error.find("too large") != std::string::npos);
  CHECK_EQ(end.rows + end.lost, kRows);
  const std::vector<Row> rows = rows_of(file); // the last row is complete too
  CHECK_EQ(rows.size(), end.rows);
  CHECK(rows.size() > 1000);
  CHECK_EQ(rows.back().bytes, end.rows - 1);
}

TEST(a_forked_child_leaves_the_log_alone) {
  const ScratchFile file;
  Rig rig;
  auto* const log = new AllocationLog(file.path());
  rig.memory.set_observer(log);
  constexpr int kTurns = 20; // forks at different points of the log thread's work
  for (int turn = 0; turn < kTurns; ++turn) {
    Block* const block = rig.memory.allocate(100, kDevice, kStream);
    rig.memory.before_fork();
    const pid_t child = ::fork();
    if (child == 0) {
      rig.memory.after_fork_in_child();
      rig.memory.free(block);
      log->allocated(&rig, 5, kStream);
      const AllocationLogEnd end = log->close();
      delete log;
      ::_exit(end.error.empty() && end.rows == 0 ? 0 : 1);
    }
    rig.memory.after_fork_in_parent();
    CHECK(child > 0);
    int status = -1;
    ::waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    rig.memory.free(block);
  }
  rig.memory.set_observer(nullptr);
  CHECK_EQ(log->close().rows, std::uint64_t{2 * kTurns});
  delete log;
  CHECK(replayed(rows_of(file)).empty());
}

HARNESS_MAIN()
