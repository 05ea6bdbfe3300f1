// Logs of allocations: rows in RMM's format in a possible order, of an observed allocator and of the adaptor; full
// disks, forked children.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "allocator/adaptors/adaptors.h"
#include "allocator/allocation_log.h"
#include "face_rig.h"

using namespace face;

namespace {

/// The path of a log in a folder of its own. The destructor removes the folder.
class ScratchFile {
 public:
  ScratchFile() {
    std::string name = (std::filesystem::temp_directory_path() / "torch_uvm_log_XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~ScratchFile() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  std::string path() const {
    return (folder_ / "log.csv").string();
  }

 private:
  std::filesystem::path folder_;
};

struct Row {
  std::string thread, action, pointer;
  std::size_t bytes = 0;
  std::string stream;
};

/// Parses a file with a header; a malformed row fails the test.
std::vector<Row> rows_of(const ScratchFile& scratch) {
  static const std::regex form(
      R"((\d+),\d\d:\d\d:\d\d\.\d{6},(allocate|free|allocate failure),(0x[0-9a-f]+|\(nil\)),(\d+),(0|0x[0-9a-f]+))");
  std::ifstream file(scratch.path());
  std::string line;
  CHECK(std::getline(file, line));
  CHECK_EQ(line, "Thread,Time,Action,Pointer,Size,Stream");
  std::vector<Row> rows;
  while (std::getline(file, line)) {
    std::smatch match;
    if (!std::regex_match(line, match, form)) {
      harness::fail(__FILE__, __LINE__, "no row: " + line);
    }
    rows.push_back({match[1], match[2], match[3], std::stoull(match[4]), match[5]});
  }
  return rows;
}

/// Checks that no live address is allocated again and that only live addresses are freed, with their size.
/// \return the allocations that are live at the end
std::map<std::string, std::size_t> replayed(const std::vector<Row>& rows) {
  std::map<std::string, std::size_t> live;
  for (const Row& row : rows) {
    if (row.action == "allocate") {
      CHECK(live.emplace(row.pointer, row.bytes).second);
    } else if (row.action == "free") {
      const auto known = live.find(row.pointer);
      CHECK(known != live.end());
      CHECK_EQ(known->second, row.bytes);
      live.erase(known);
    }
  }
  return live;
}

struct Rig {
  RecordingRuntime runtime{2};
  CachingManagedAllocator memory{runtime, std::make_unique<ManagedSegmentSource>(runtime)};
  std::shared_ptr<Allocator> caching = std::make_shared<CachingAllocator>(memory);
};

} // namespace

TEST(rows_have_rmms_format) {
  const ScratchFile file;
  AllocationLog log(file.path());
  log.allocated(reinterpret_cast<void*>(0x7f0c3a000000), 1048576, kStream);
  log.freed(reinterpret_cast<void*>(0x7f0c3a000000), 1048576, kStream);
  log.refused(68719476736, {0, reinterpret_cast<void*>(0x2)});
  const AllocationLogEnd end = log.close();
  CHECK_EQ(end.error, "");
  CHECK_EQ(end.rows, std::uint64_t{3});
  const std::vector<Row> rows = rows_of(file);
  CHECK_EQ(rows.size(), std::size_t{3});
  CHECK_EQ(rows[0].thread, std::to_string(::gettid()));
  CHECK_EQ(rows[0].action, "allocate");
  CHECK_EQ(rows[0].pointer, "0x7f0c3a000000");
  CHECK_EQ(rows[0].bytes, std::size_t{1048576});
  CHECK_EQ(rows[0].stream, "0");
  CHECK_EQ(rows[1].action, "free");
  CHECK_EQ(rows[2].action, "allocate failure");
  CHECK_EQ(rows[2].pointer, "(nil)");
  CHECK_EQ(rows[2].stream, "0x2");
  log.freed(nullptr, 1, kStream); // logging has stopped: no row
  CHECK_EQ(log.close().rows, std::uint64_t{3});
}

TEST(a_logged_stream_names_its_device) {
  const Stream streams[] = {Stream::host(),
                            kStream,
                            Stream::default_of(3),
                            {0, reinterpret_cast<void*>(0x7fffdeadbee0)},
                            {7, reinterpret_cast<void*>(0x10)}};
  std::set<std::uint64_t> seen;
  for (const Stream stream : streams) {
    seen.insert(logged_stream(stream));
    CHECK(stream_from_log(logged_stream(stream)) == stream);
  }
  CHECK_EQ(seen.size(), std::size(streams));
  CHECK_EQ(logged_stream({0, reinterpret_cast<void*>(0x55550000)}), std::uint64_t{0x55550000}); // RMM's representation
  CHECK_THROWS(InvalidArgument, stream_from_log(0x8000000000000000));
  CHECK_THROWS(InvalidArgument, stream_from_log(0xffff000000000001));
}

TEST(an_observed_allocator_logs_every_allocation_and_free) {
  const ScratchFile file;
  Rig rig;
  AllocationLog log(file.path());
  Block* const before = rig.memory.allocate(100, kHome, kStream);
  rig.memory.set_log(&log);
  Block* const first = rig.memory.allocate(1000, kHome, kStream);
  Block* const host = rig.memory.allocate(3000, Location::host(), Stream::host());
  rig.memory.free(first);
  Block* const again = rig.memory.allocate(1000, kHome, kStream);
  Block* const tried = rig.memory.try_allocate(500, kHome, kStream);
  CHECK_EQ(rig.memory.allocate(0, kHome, kStream), static_cast<Block*>(nullptr));
  rig.runtime.set_limit(rig.runtime.managed_bytes());
  CHECK_THROWS(OutOfMemory, rig.memory.allocate(64 * MiB, kHome, kStream));
  CHECK_THROWS(OutOfMemory, rig.memory.allocate(~std::size_t{0}, kHome, kStream));
  CHECK_EQ(rig.memory.try_allocate(64 * MiB, kHome, kStream),
           static_cast<Block*>(nullptr)); // a refused try_allocate is not a failure: no row
  const Event event = rig.runtime.create_event(0, false);
  rig.runtime.record_event(event, kStream);
  rig.memory.free_after(again, event, kStream);
  rig.memory.free(host);
  rig.memory.free(before);
  rig.memory.set_log(nullptr);
  rig.memory.free(tried);
  CHECK_EQ(log.close().error, "");

  const std::vector<Row> rows = rows_of(file);
  const std::vector<std::pair<std::string, std::size_t>> expected = {{"allocate", 1000},
                                                                     {"allocate", 3000},
                                                                     {"free", 1000},
                                                                     {"allocate", 1000},
                                                                     {"allocate", 500},
                                                                     {"allocate failure", 64 * MiB},
                                                                     {"allocate failure", ~std::size_t{0}},
                                                                     {"free", 1000},
                                                                     {"free", 3000},
                                                                     {"free", 100}};
  CHECK_EQ(rows.size(), expected.size());
  for (std::size_t at = 0; at < rows.size(); ++at) {
    CHECK_EQ(rows[at].action, expected[at].first);
    CHECK_EQ(rows[at].bytes, expected[at].second);
  }
  CHECK_EQ(rows[3].pointer, rows[0].pointer); // the block was reused: the row of its free comes first
  CHECK_EQ(rows[1].stream, "0xffff000000000000");
}

TEST(a_relocated_block_is_logged_as_a_free_and_an_allocation) {
  const ScratchFile file;
  Rig rig;
  AllocationLog log(file.path());
  rig.memory.set_log(&log);
  // A segment under a cap with more than 10 MiB free, but not contiguously.
  rig.memory.set_cap(0, 32 * MiB);
  std::vector<Block*> blocks;
  for (int number = 0; number < 16; ++number) {
    blocks.push_back(rig.memory.allocate(2 * MiB, kHome, kStream));
    rig.memory.set_tag(blocks.back(), &blocks);
  }
  for (const std::size_t number : {0, 2, 4, 6, 8, 10}) {
    rig.memory.free(blocks[number]);
    blocks[number] = nullptr;
  }
  const auto moves = rig.memory.reserve_moves(
      8 * MiB, 0, kStream, [](void*, std::size_t bytes) { return double(bytes); }, [](void*) { return true; });
  CHECK(!moves.empty());
  for (const CachingManagedAllocator::Move& move : moves) {
    if (&move == &moves.front()) {
      rig.memory.roll_back(move);
    } else {
      std::replace(blocks.begin(), blocks.end(), move.from, move.to);
      rig.memory.commit(move);
    }
  }
  for (Block* const block : blocks) {
    rig.memory.free(block);
  }
  rig.memory.set_log(nullptr);
  CHECK_EQ(log.close().error, "");
  const std::vector<Row> rows = rows_of(file);
  CHECK(rows.size() > 2 * 16);
  CHECK(replayed(rows).empty());
}

TEST(an_adaptor_logs_allocations_frees_and_failures) {
  const ScratchFile file;
  Rig rig;
  Adaptor logging(rig.caching, {.log = file.path()});
  CHECK_EQ(logging.description(), "log(caching)");
  const Stream other = rig.runtime.create_stream(0, 0);
  const Allocation first = logging.allocate(700, kHome, other);
  logging.free(logging.allocate(0, kHome, kStream));
  rig.caching->free(rig.caching->allocate(5000, kHome, kStream)); // bypasses the adaptor
  logging.free(first);
  logging.free(logging.allocate(800, kHome, kStream));
  CHECK_THROWS(InvalidArgument, logging.allocate(900, Location::device(9), kStream));
  CHECK_EQ(logging.close_log().error, "");
  const std::vector<Row> rows = rows_of(file);
  CHECK_EQ(rows.size(), std::size_t{5});
  CHECK(rows[0].stream != "0");
  CHECK_EQ(rows[1].stream, rows[0].stream);
  CHECK_EQ(rows[2].stream, "0");
  CHECK_EQ(rows[4].action, "allocate failure");
  CHECK_EQ(rows[4].bytes, std::size_t{900});
  CHECK(replayed(rows).empty());
  rig.runtime.destroy_stream(other);
}

TEST(rows_of_several_threads_are_in_a_possible_order) {
  for (const bool observed : {true, false}) {
    const ScratchFile files[2]; // of the observer and of the adaptor
    Rig rig;
    AllocationLog log(files[0].path());
    Adaptor logging(rig.caching, {.log = files[1].path()});
    Allocator& used = observed ? *rig.caching : logging;
    rig.memory.set_log(observed ? &log : nullptr);
    std::vector<std::thread> threads;
    constexpr int kTurns = 3000; // more rows than a block of the log
    for (int number = 0; number < 4; ++number) {
      threads.emplace_back([&] {
        for (int turn = 0; turn < kTurns; ++turn) {
          const Allocation one = used.allocate(512, kHome, kStream);
          used.free(used.allocate(512, kHome, kStream));
          used.free(one);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    rig.memory.set_log(nullptr);
    CHECK_EQ((observed ? log.close() : logging.close_log()).rows, std::uint64_t{4 * 4 * kTurns});
    CHECK(replayed(rows_of(files[observed ? 0 : 1])).empty());
  }
}

// --- files --------------------------------------------------------------------------------------------------------

TEST(a_file_that_cannot_be_created_is_refused_by_name) {
  try {
    AllocationLog log("/no such folder/log.csv");
    harness::fail(__FILE__, __LINE__, "it was made");
  } catch (const InvalidArgument& error) {
    CHECK(std::string(error.what()).find("/no such folder/log.csv") != std::string::npos);
  }
}

TEST(a_full_disk_is_reported_at_the_end_and_stops_nothing) {
  for (const std::uint64_t count : {1, 10000}) {
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
  CHECK(rows.size() > 500);
  CHECK_EQ(rows.back().bytes, end.rows - 1);
}

TEST(a_forked_child_leaves_the_log_alone) {
  const ScratchFile file;
  Rig rig;
  auto log = std::make_unique<AllocationLog>(file.path());
  rig.memory.set_log(log.get());
  Block* const block = rig.memory.allocate(100, kHome, kStream);
  rig.memory.before_fork();
  const pid_t child = ::fork();
  if (child == 0) {
    rig.memory.after_fork_in_child();
    rig.memory.free(block);
    log->allocated(&rig, 5, kStream);
    const AllocationLogEnd end = log->close();
    log.reset();
    ::_exit(end.error.empty() && end.rows == 0 ? 0 : 1);
  }
  rig.memory.after_fork_in_parent();
  CHECK(child > 0);
  int status = -1;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  rig.memory.free(block);
  rig.memory.set_log(nullptr);
  CHECK_EQ(log->close().rows, std::uint64_t{2});
  CHECK(replayed(rows_of(file)).empty());
}

HARNESS_MAIN()
