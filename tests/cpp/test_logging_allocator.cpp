// The adaptor that logs the allocations passing through it.
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "allocator/replay/logging_allocator.h"
#include "log_rig.h"

using namespace logs;

namespace {

/// Logs a row when the upstream allocates and when it frees.
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

} // namespace

TEST(an_adaptor_logs_allocations_frees_and_failures) {
  const ScratchFile file;
  Rig rig;
  const auto log = std::make_shared<AllocationLog>(file.path());
  LoggingAllocator logging(rig.caching, log);
  CHECK_EQ(logging.description(), "log(caching)");
  const Stream other = rig.runtime.create_stream(0, 0);
  const Allocation first = logging.allocate(700, kDevice, other);
  logging.free(logging.allocate(0, kDevice, kStream));
  rig.caching->free(rig.caching->allocate(5000, kDevice, kStream)); // bypasses the adaptor
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

TEST(rows_are_written_while_the_caller_owns_the_memory) {
  const ScratchFile file;
  Rig rig;
  const auto log = std::make_shared<AllocationLog>(file.path());
  LoggingAllocator logging(std::make_shared<Marking>(rig.caching, *log), log);
  logging.free(logging.allocate(100, kDevice, kStream));
  CHECK_EQ(log->close().rows, std::uint64_t{4});
  const std::vector<Row> rows = rows_of(file);
  CHECK_EQ(rows[0].bytes, std::size_t{1}); // the upstream's allocation
  CHECK_EQ(rows[1].action, "allocate");
  CHECK_EQ(rows[2].action, "free");
  CHECK_EQ(rows[3].bytes, std::size_t{2}); // the upstream's free
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

HARNESS_MAIN()
