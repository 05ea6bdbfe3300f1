// Driver calls of transfers, counted while steps repeat and the compute stream has the latest operator still to run.
#include <map>
#include <string>

#include "residency_rig.h"

using namespace residency;

namespace {

constexpr std::size_t kPiece = 512 * KiB; ///< bytes of a storage
constexpr std::size_t kStorages = 512;
constexpr std::size_t kHeld = 256; ///< storages that the budget holds
constexpr int kSteps = 4;

struct Counted {
  std::map<std::string, std::int64_t> calls;
  std::int64_t transfers = 0; ///< fetches and write-backs
  std::int64_t all = 0;
};

/// Steps of operators that use one storage each, of twice as many as the budget holds.
Counted steps(std::size_t slot_bytes, bool writes) {
  Rig rig;
  rig.engine.set_staging(slot_bytes);
  rig.engine.set_budget(0, kHeld * kPiece + 4 * slot_bytes);
  const Event work = rig.runtime.create_event(0, false);
  for (std::size_t number = 0; number < kStorages; ++number) {
    rig.make(static_cast<unsigned char>(number), kPiece);
  }
  const auto step = [&] {
    for (std::size_t index = 0; index < kStorages; ++index) {
      rig.runtime.release(kStream);
      rig.runtime.hold(kStream); // the earlier operators are done, and this one is not before the next begins
      rig.run(30 + index, {rig.storages[index].get()}, writes, [&] { rig.runtime.record_event(work, kStream); });
    }
  };
  for (int warm_up = 0; warm_up < 16; ++warm_up) {
    step();
  }
  const ResidencyStatistics before = rig.engine.statistics();
  rig.runtime.clear_calls();
  for (int measured = 0; measured < kSteps; ++measured) {
    step();
  }
  Counted counted;
  for (const RecordedCall& call : rig.runtime.calls()) {
    if (call.ptr != work.handle) {
      ++counted.calls[call.name];
      ++counted.all;
    }
  }
  const ResidencyStatistics after = rig.engine.statistics();
  counted.transfers = after.fetched.count - before.fetched.count + after.written_back.count - before.written_back.count;
  CHECK((after.written_back.count != before.written_back.count) == writes);
  rig.runtime.release(kStream);
  rig.check_engine();
  rig.runtime.destroy_event(work);
  return counted;
}

/// \param most calls per transfer, in hundredths
void expect(std::size_t slot_bytes, bool writes, std::int64_t most) {
  const Counted counted = steps(slot_bytes, writes);
  CHECK(counted.transfers > 1000);
  CHECK_EQ(counted.calls.at("copy_async"), (slot_bytes == 0 ? 1 : 2) * counted.transfers);
  if (100 * counted.all > most * counted.transfers) {
    std::string seen;
    for (const auto& [call, count] : counted.calls) {
      seen += " " + call + " " + std::to_string(count);
    }
    harness::fail(__FILE__, __LINE__, std::to_string(counted.transfers) + " transfers made" + seen);
  }
}

} // namespace

// A fetch: the copy, an event when it is done, the operator's query of it; and a query, an event and a wait so that it
// follows the last use of its block.
TEST(direct_fetches_make_six_calls) {
  expect(0, false, 605);
}

// A write-back has an event and a wait to follow the operator, an event when its block has been read and another when
// the host's copy is there, and a query of each. The fetch into its block queries the former again, and waits for
// nothing.
TEST(direct_fetches_and_write_backs_make_six_calls) {
  expect(0, true, 605);
}

// Staged, each has a copy more, an event and a wait between the two copies, and another pair for each slot.
TEST(staged_copies_that_fill_their_slots_make_ten_calls) {
  expect(kPiece, false, 1106);
  expect(kPiece, true, 1055);
}

TEST(staged_copies_that_share_slots_make_fewer) {
  expect(4 * kPiece, false, 973);
  expect(4 * kPiece, true, 922);
}

HARNESS_MAIN()
