// The log of allocations: rows as RMM has them, their order, and what is said of a disk that is full.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "allocator/adaptors/caching_allocator.h"
#include "allocator/replay/allocation_log.h"
#include "allocator/replay/logging_allocator.h"
#include "harness.h"
#include "runtime/bytes.h"
#include "runtime/error.h"
#include "runtime/testing/recording_runtime.h"

namespace {

using namespace torch_uvm;

constexpr Location kDevice = Location::device(0);
constexpr Stream kStream = Stream::default_of(0);

/// A file of this test's own, gone with it.
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
  std::vector<std::string> lines() const {
    std::ifstream file(path());
    std::vector<std::string> all;
    for (std::string line; std::getline(file, line);) {
      all.push_back(line);
    }
    return all;
  }

 private:
  std::filesystem::path folder_;
};

struct Row {
  std::string thread, action, pointer;
  std::size_t bytes = 0;
  std::string stream;
};

/// Rows of a file with a header; a line of any other form fails the test.
std::vector<Row> rows_of(const ScratchFile& file) {
  static const std::regex form(
      R"((\d+),\d\d:\d\d:\d\d\.\d{6},(allocate|free|allocate failure),(0x[0-9a-f]+|\(nil\)),(\d+),(0|0x[0-9a-f]+))");
  const std::vector<std::string> lines = file.lines();
  CHECK(!lines.empty());
  CHECK_EQ(lines[0], "Thread,Time,Action,Pointer,Size,Stream");
  std::vector<Row> rows;
  for (std::size_t at = 1; at < lines.size(); ++at) {
    std::smatch match;
    if (!std::regex_match(lines[at], match, form)) {
      harness::fail(__FILE__, __LINE__, "no row: " + lines[at]);
    }
    rows.push_back({match[1], match[2], match[3], std::stoull(match[4]), match[5]});
  }
  return rows;
}

/// Checks that no address is allocated twice, or freed when it is not. \return what is live at the end
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

std::string text_of(const void* ptr) {
  std::ostringstream text;
  text << ptr;
  return text.str();
}

struct Rig {
  RecordingRuntime runtime{2};
  CachingManagedAllocator memory{runtime, std::make_unique<ManagedSegmentSource>(runtime)};
  std::shared_ptr<Allocator> caching = std::make_shared<CachingAllocator>(memory);
};

TEST(rows_are_as_rmm_writes_them) {
  const ScratchFile file;
  AllocationLog log(file.path());
  log.allocated(reinterpret_cast<void*>(0x7f0c3a000000), 1048576, kStream);
  log.freed(reinterpret_cast<void*>(0x7f0c3a000000), 1048576, kStream);
  log.refused(68719476736, {0, reinterpret_cast<void*>(0x2)});
  const AllocationLogEnd end = log.close();
  CHECK_EQ(end.error, "");
  CHECK_EQ(end.rows, std::uint64_t{3});
  CHECK_EQ(end.lost, std::uint64_t{0});
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
  log.freed(nullptr, 1, kStream); // nothing is recorded any more
  CHECK_EQ(log.close().rows, std::uint64_t{3});
}

TEST(a_stream_says_whose_it_is) {
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
  CHECK_EQ(logged_stream({0, reinterpret_cast<void*>(0x55550000)}), std::uint64_t{0x55550000}); // as RMM has it
  CHECK_THROWS(InvalidArgument, stream_from_log(0x8000000000000000));
  CHECK_THROWS(InvalidArgument, stream_from_log(0xffff000000000001));
}

TEST(an_observed_allocator_tells_of_all_that_comes_and_goes) {
  const ScratchFile file;
  Rig rig;
  AllocationLog log(file.path());
  Block* const before = rig.memory.allocate(100, kDevice, kStream);
  rig.memory.set_observer(&log);
  Block* const first = rig.memory.allocate(1000, kDevice, kStream);
  Block* const host = rig.memory.allocate(3000, Location::host(), Stream::host());
  const std::string address = text_of(rig.memory.data(first));
  rig.memory.free(first);
  Block* const again = rig.memory.allocate(1000, kDevice, kStream);
  Block* const tried = rig.memory.try_allocate(500, kDevice, kStream);
  CHECK_EQ(rig.memory.allocate(0, kDevice, kStream), static_cast<Block*>(nullptr));
  rig.runtime.set_limit(rig.runtime.managed_bytes());
  CHECK_THROWS(OutOfMemory, rig.memory.allocate(64 * MiB, kDevice, kStream));
  CHECK_THROWS(OutOfMemory, rig.memory.allocate(~std::size_t{0}, kDevice, kStream));
  CHECK_EQ(rig.memory.try_allocate(64 * MiB, kDevice, kStream),
           static_cast<Block*>(nullptr)); // no failure: who tries asks
  const Event event = rig.runtime.create_event(0, false);
  rig.runtime.record_event(event, kStream);
  rig.memory.free_after(again, event, kStream);
  rig.memory.free(host);
  rig.memory.free(before);
  rig.memory.set_observer(nullptr);
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
  CHECK_EQ(rows[0].pointer, address);
  CHECK_EQ(rows[3].pointer, address); // reused, and its free is before
  CHECK_EQ(rows[1].stream, "0xffff000000000000");
}

TEST(blocks_that_move_are_freed_where_they_were_and_allocated_where_they_are) {
  const ScratchFile file;
  Rig rig;
  AllocationLog log(file.path());
  rig.memory.set_observer(&log);
  // A segment under a cap, in which nothing of 10 MiB is free in one piece.
  rig.memory.set_cap(0, 32 * MiB, true);
  std::vector<Block*> blocks;
  for (int number = 0; number < 16; ++number) {
    blocks.push_back(rig.memory.allocate(2 * MiB, kDevice, kStream));
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
  rig.memory.set_observer(nullptr);
  CHECK_EQ(log.close().error, "");
  const std::vector<Row> rows = rows_of(file);
  CHECK(rows.size() > 2 * 16);
  CHECK(replayed(rows).empty());
  CHECK_EQ(rig.memory.statistics().allocation[0].current, 0);
}

TEST(threads_leave_rows_in_an_order_that_happened) {
  const ScratchFile file;
  Rig rig;
  AllocationLog log(file.path());
  rig.memory.set_observer(&log);
  std::vector<std::thread> threads;
  constexpr int kTurns = 30000; // more rows than the log holds in memory
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&, number] {
      std::vector<Block*> mine(8, nullptr);
      for (int turn = 0; turn < kTurns; ++turn) {
        Block*& place = mine[static_cast<std::size_t>(turn * 5 % 8)];
        rig.memory.free(place);
        place = rig.memory.allocate(static_cast<std::size_t>(1 + (turn * 37 + number) % 5000), kDevice, kStream);
      }
      for (Block* const block : mine) {
        rig.memory.free(block);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  rig.memory.set_observer(nullptr);
  const AllocationLogEnd end = log.close();
  CHECK_EQ(end.error, "");
  CHECK_EQ(end.rows, std::uint64_t{2 * 4 * kTurns});
  CHECK(end.rows > 2 * AllocationLog::kBlockRows);
  const std::vector<std::string> lines = file.lines();
  CHECK_EQ(lines.size(), end.rows + 1);
  std::set<std::string> numbers, live;
  for (std::size_t at = 1; at < lines.size(); ++at) { // rows_of would take its time
    std::istringstream line(lines[at]);
    std::string thread, time, action, pointer;
    std::getline(line, thread, ',');
    std::getline(line, time, ',');
    std::getline(line, action, ',');
    std::getline(line, pointer, ',');
    numbers.insert(thread);
    CHECK(action == "allocate" ? live.insert(pointer).second : live.erase(pointer) == 1);
  }
  CHECK(live.empty());
  CHECK_EQ(numbers.size(), std::size_t{4});
}

TEST(an_adaptor_logs_what_passes_and_what_is_refused) {
  const ScratchFile file;
  Rig rig;
  const auto log = std::make_shared<AllocationLog>(file.path());
  LoggingAllocator logging(rig.caching, log);
  CHECK_EQ(logging.description(), "log(caching)");
  const Stream other = rig.runtime.create_stream(0, 0);
  const Allocation first = logging.allocate(700, kDevice, other);
  logging.free(logging.allocate(0, kDevice, kStream));
  rig.caching->free(rig.caching->allocate(5000, kDevice, kStream)); // goes by it
  logging.free(first);
  logging.free(logging.allocate(800, kDevice, kStream));
  CHECK_THROWS(InvalidArgument, logging.allocate(900, Location::device(9), kStream));
  CHECK_EQ(log->close().error, "");
  const std::vector<Row> rows = rows_of(file);
  CHECK_EQ(rows.size(), std::size_t{5});
  CHECK_EQ(rows[0].stream, text_of(other.handle));
  CHECK_EQ(rows[1].stream, rows[0].stream);
  CHECK_EQ(rows[2].stream, "0");
  CHECK_EQ(rows[4].action, "allocate failure");
  CHECK_EQ(rows[4].bytes, std::size_t{900});
  CHECK(replayed(rows).empty());
  CHECK_EQ(rig.caching->figures().allocations, 0);
  CHECK_THROWS(InvalidArgument, LoggingAllocator(nullptr, log));
  CHECK_THROWS(InvalidArgument, LoggingAllocator(rig.caching, nullptr));
}

/// Leaves a row of its own where memory comes back to it, or goes.
class Marking final : public Adaptor {
 public:
  Marking(std::shared_ptr<Allocator> upstream, AllocationLog& log) : Adaptor(std::move(upstream)), log_(log) {}
  Allocation allocate(std::size_t bytes, Location home, Stream stream) override {
    log_.refused(1, stream);
    return Adaptor::allocate(bytes, home, stream);
  }
  void free(const Allocation& allocation) noexcept override {
    log_.refused(2, kStream);
    Adaptor::free(allocation);
  }
  std::string description() const override {
    return "marking";
  }

 private:
  AllocationLog& log_;
};

TEST(rows_stand_while_the_memory_is_the_callers) {
  const ScratchFile file;
  Rig rig;
  const auto log = std::make_shared<AllocationLog>(file.path());
  LoggingAllocator logging(std::make_shared<Marking>(rig.caching, *log), log);
  logging.free(logging.allocate(100, kDevice, kStream));
  CHECK_EQ(log->close().rows, std::uint64_t{4});
  const std::vector<Row> rows = rows_of(file);
  CHECK_EQ(rows[0].bytes, std::size_t{1}); // the upstream was asked
  CHECK_EQ(rows[1].action, "allocate");
  CHECK_EQ(rows[2].action, "free");
  CHECK_EQ(rows[3].bytes, std::size_t{2}); // the upstream got it back
}

TEST(an_adaptor_logs_a_free_before_the_upstream_has_the_memory) {
  const ScratchFile file;
  Rig rig;
  const auto log = std::make_shared<AllocationLog>(file.path());
  LoggingAllocator logging(rig.caching, log);
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < 3000; ++turn) {
        const Allocation one = logging.allocate(512, kDevice, kStream), two = logging.allocate(512, kDevice, kStream);
        logging.free(one);
        logging.free(two);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_EQ(log->close().rows, std::uint64_t{4 * 3000 * 4});
  CHECK(replayed(rows_of(file)).empty());
}

TEST(a_file_that_cannot_be_made_is_refused_by_its_name) {
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

TEST(a_disk_that_becomes_full_leaves_whole_rows) {
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
  const std::vector<Row> rows = rows_of(file); // the last one is whole, too
  CHECK_EQ(rows.size(), end.rows);
  CHECK(rows.size() > 1000);
  CHECK_EQ(rows.back().bytes, end.rows - 1);
}

TEST(a_forked_child_leaves_the_log_alone) {
  const ScratchFile file;
  Rig rig;
  auto* const log = new AllocationLog(file.path());
  rig.memory.set_observer(log);
  constexpr int kTurns = 20; // whatever its thread is at as the process is copied
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

} // namespace

HARNESS_MAIN()
