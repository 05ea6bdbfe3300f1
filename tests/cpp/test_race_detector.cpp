// The detector of races and stale bytes (benchmarks/cpp/race_detector.h) that traces are played under.
#include <array>

#include "../../benchmarks/cpp/race_detector.h"
#include "harness.h"

namespace {

using namespace play;

/// Memory with an address only.
char* at(std::uintptr_t address) {
  return reinterpret_cast<char*>(address << 12);
}

constexpr std::size_t kBytes = 4096;

struct Work {
  RaceDetector races;
  std::array<char, 4> handles{};
  const Stream compute = Stream::default_of(0);
  const Stream out{0, handles.data()};
  const Stream in{0, handles.data() + 1};
  Event event{handles.data() + 2};

  RaceDetector::Version write(char* ptr, Stream stream, std::size_t bytes = kBytes) {
    races.begin_kernel(stream);
    return races.kernel_writes(ptr, bytes, stream);
  }
  void read(char* ptr, Stream stream, RaceDetector::Version version, std::size_t bytes = kBytes) {
    races.begin_kernel(stream);
    races.kernel_reads(ptr, bytes, stream, version, "an operator");
  }
  void order(Stream earlier, Stream later) {
    races.record(event, earlier);
    races.wait(later, event);
  }
};

TEST(one_stream_is_in_order) {
  Work work;
  const auto version = work.write(at(1), work.compute);
  work.races.copy(at(2), at(1), kBytes, work.compute);
  work.write(at(1), work.compute);
  work.read(at(2), work.compute, version);
  CHECK_EQ(work.races.faults(), 0u);
}

TEST(a_read_on_another_stream_needs_an_event) {
  for (const bool ordered : {false, true}) {
    Work work;
    work.write(at(1), work.compute);
    if (ordered) {
      work.order(work.compute, work.out);
    }
    work.races.copy(at(2), at(1), kBytes, work.out);
    CHECK_EQ(work.races.faults(), ordered ? 0u : 1u);
  }
}

TEST(an_event_orders_what_was_queued_before_it_was_recorded) {
  Work work;
  work.races.record(work.event, work.compute);
  const auto version = work.write(at(1), work.compute);
  work.races.wait(work.out, work.event);
  work.read(at(1), work.out, version);
  CHECK_EQ(work.races.faults(), 1u);
}

TEST(the_host_orders_what_it_has_seen_to_end) {
  Work work;
  work.races.record(work.event, work.compute);
  const auto early = work.write(at(1), work.compute);
  work.races.host_saw(work.event);
  work.read(at(1), work.out, early);
  CHECK_EQ(work.races.faults(), 1u); // the event was recorded before the write
  const auto late = work.write(at(3), work.compute);
  work.races.host_saw(work.compute);
  work.read(at(3), work.out, late);
  CHECK_EQ(work.races.faults(), 1u);
}

TEST(two_writes_need_an_order) {
  Work work;
  work.write(at(1), work.compute);
  work.write(at(1), work.out);
  CHECK_EQ(work.races.faults(), 1u);
  CHECK(work.races.first_fault().starts_with("a write that is not ordered after a write"));
}

TEST(memory_that_a_kernel_still_reads_is_not_written) {
  Work work;
  const auto version = work.write(at(1), work.compute);
  work.read(at(1), work.compute, version);
  work.races.host_saw(work.compute);
  work.read(at(1), work.compute, version);
  work.write(at(1), work.out);
  CHECK_EQ(work.races.faults(), 1u);
}

TEST(bytes_that_a_copy_still_reads_spoil_the_copy) {
  Work work;
  const auto version = work.write(at(1), work.compute);
  work.order(work.compute, work.out);
  work.races.copy(at(2), at(1), kBytes, work.out);
  work.races.copy(at(3), at(2), kBytes, work.out);
  work.races.copy(at(5), at(1), kBytes, work.compute);
  const auto next = work.write(at(1), work.compute); // before the first copy may have read them
  CHECK_EQ(work.races.faults(), 0u);
  work.read(at(1), work.compute, next);
  work.read(at(5), work.compute, version);
  CHECK_EQ(work.races.faults(), 0u);
  work.read(at(3), work.out, version);
  CHECK_EQ(work.races.faults(), 1u);
  CHECK(work.races.first_fault().starts_with("an operator reads spoilt bytes"));
}

TEST(stale_and_shifted_bytes_are_found) {
  Work work;
  const auto old = work.write(at(1), work.compute, 2 * kBytes);
  work.races.copy(at(8), at(1), 2 * kBytes, work.compute);
  const auto now = work.write(at(1), work.compute, 2 * kBytes);
  work.read(at(8), work.compute, old, 2 * kBytes);
  CHECK_EQ(work.races.faults(), 0u);
  work.read(at(8), work.compute, now, 2 * kBytes);
  CHECK_EQ(work.races.faults(), 2u - 1u);
  work.races.copy(at(16), at(1) + kBytes, kBytes, work.compute); // the second half only
  work.races.copy(at(16) + kBytes, at(1), kBytes, work.compute);
  const auto before = work.races.faults();
  work.read(at(16), work.compute, now, 2 * kBytes);
  CHECK_EQ(work.races.faults(), before + 2);
}

TEST(a_copy_in_pieces_is_whole) {
  Work work;
  const auto version = work.write(at(1), work.compute, 4 * kBytes);
  for (std::size_t done = 0; done < 4 * kBytes; done += kBytes / 2) { // towards lower addresses, over itself
    work.races.copy(at(1) - kBytes / 2 + done, at(1) + done, kBytes / 2, work.compute);
  }
  work.read(at(1) - kBytes / 2, work.compute, version, 4 * kBytes);
  CHECK_EQ(work.races.faults(), 0u);
}

TEST(a_copy_over_itself_is_a_fault) {
  Work work;
  work.races.copy(at(1) + 1, at(1), kBytes, work.compute);
  CHECK_EQ(work.races.faults(), 1u);
}

} // namespace

HARNESS_MAIN()
