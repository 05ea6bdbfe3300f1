// Contiguous room for the result of an operator, made before it runs while its operands can still move.
#include <cstring>
#include <memory>
#include <vector>

#include "residency_rig.h"

namespace {

using namespace residency;

/// Steps over storages that fill the budget of two equal segments. Then an operator needs a large contiguous result.
struct ResultInPieces {
  Rig rig;
  std::vector<Storage*> others; ///< used before that operator, and not by it
  std::vector<Storage*> operands; ///< of that operator; it writes to the first
  std::size_t result = 0;
  bool temporary = false; ///< whether the result is freed in the operator
  std::int64_t moved = 0; ///< blocks relocated, in all steps

  void step() {
    OperatorKey key = 30;
    for (Storage* const other : others) {
      rig.run(key++, {other}, true, [&] { write_next(*other); });
    }
    Storage& made = make_result();
    if (!temporary) {
      rig.run(22, {&made}, true, [&] { Rig::check(made); });
      rig.free(made);
    }
    rig.storages.pop_back();
    rig.engine.mark_step({});
    rig.check_engine();
  }

  /// \return the number of operators of scheduled steps that exceeded the budget
  std::int64_t play() {
    for (int number = 0; number < 6; ++number) {
      step();
    }
    CHECK(rig.engine.statistics().plan_hits > 0);
    moved = rig.engine.statistics().moved.count;
    rig.engine.reset_statistics();
    for (int number = 0; number < 20; ++number) {
      step();
    }
    const ResidencyStatistics figures = rig.engine.statistics();
    CHECK_EQ(figures.plan_misses, 0);
    CHECK_EQ(figures.failures, 0);
    moved += figures.moved.count;
    for (const auto& storage : rig.storages) {
      Rig::check(*storage);
    }
    return figures.over_budget;
  }

  Storage& make_result() {
    Engine::Frame frame;
    frame.key = 21;
    {
      const Engine::Lock lock(rig.engine);
      std::vector<Engine::Operand> used;
      for (Storage* const operand : operands) {
        used.push_back({operand->record, operand == operands.front()});
      }
      rig.engine.begin(frame, {frame.key, "test", false, false, false}, used, rig.streams);
    }
    rig.storages.push_back(std::make_unique<Storage>());
    Storage& made = *rig.storages.back();
    made.bytes = result;
    made.block = rig.memory.allocate(result, Location::device(0), kStream);
    made.ptr = static_cast<unsigned char*>(rig.memory.data(made.block));
    rig.engine.note_allocation(0);
    Rig::write(made, 200);
    for (Storage* const operand : operands) {
      Rig::check(*operand);
    }
    write_next(*operands.front());
    {
      const Engine::Lock lock(rig.engine);
      made.record = rig.engine.adopt(made.block, 0, &made);
      rig.engine.created(frame, made.record, rig.streams);
    }
    if (temporary) {
      rig.free(made);
    }
    const Engine::Lock lock(rig.engine);
    rig.engine.end(frame);
    return made;
  }

 private:
  static void write_next(Storage& storage) {
    Rig::check(storage);
    Rig::write(storage, static_cast<unsigned char>(storage.content + 1));
  }
};

/// The operands of a running operator cannot be moved. An operand in the midst of free memory is relocated before.
void check_relocation_for(bool temporary) {
  ResultInPieces it;
  it.temporary = temporary;
  Storage& first = it.rig.make(1, 5 * MiB / 4);
  it.operands = {&it.rig.make(2, 3 * MiB / 2)};
  Storage& second = it.rig.make(3, 5 * MiB / 4);
  Storage& held = it.rig.make(4, 2 * MiB);
  it.others = {&first, &second, &it.rig.make(5, 2 * MiB)};
  it.result = 3 * MiB; // fits only where the first two storages and the operand are now
  {
    const Engine::Lock lock(it.rig.engine);
    it.rig.engine.pin(held.record, kStream);
  }
  CHECK_EQ(it.play(), 0);
  CHECK(it.moved > 0);
  CHECK(held.block != nullptr);
}

TEST(an_operand_in_the_way_of_a_result_is_relocated_before_the_operator) {
  check_relocation_for(false);
}

TEST(an_operand_in_the_way_of_temporary_bytes_is_relocated_before_the_operator) {
  check_relocation_for(true);
}

/// If there is no other place for such an operand, it is evicted and fetched back.
TEST(an_operand_without_another_place_is_evicted_and_fetched_back) {
  ResultInPieces it;
  for (unsigned char segment = 0; segment < 2; ++segment) {
    it.others.push_back(&it.rig.make(1, 5 * MiB / 4));
    it.operands.push_back(&it.rig.make(2, 3 * MiB / 2));
    it.others.push_back(&it.rig.make(3, 5 * MiB / 4));
  }
  it.result = 3 * MiB / 2;
  CHECK_EQ(it.play(), 0);
}

/// Operands and result, which each step makes anew, fill the segment, and two others are in it, too. The budget has a
/// little more, which no segment can serve: there is room by bytes, but the others have to leave.
TEST(others_leave_a_segment_that_operands_and_result_fill) {
  constexpr std::size_t kLarge = 32 * MiB, kOther = 5 * MiB / 4, kSegment = 3 * kLarge;
  ResultInPieces it;
  Rig& rig = it.rig;
  rig.engine.set_budget(0, kSegment + 4 * kSlot);
  rig.free(rig.make(1, kSegment));
  rig.engine.set_budget(0, kSegment + 4 * MiB + 4 * kSlot);
  it.others = {&rig.make(2, kOther), &rig.make(3, kOther)};
  it.result = kLarge;
  for (int step = 0; step < 12; ++step) {
    it.operands.clear();
    for (unsigned char number = 0; number < 2; ++number) { // the operands are the others' neighbours
      Storage& other = *it.others[number];
      rig.run(30 + number, {&other}, false, [&] { Rig::check(other); });
      it.operands.push_back(&rig.make(static_cast<unsigned char>(4 + number), kLarge));
    }
    rig.free(it.make_result());
    for (Storage* const operand : it.operands) {
      Rig::check(*operand);
      rig.free(*operand);
    }
    rig.engine.mark_step({});
    rig.check_engine();
    if (step == 0) { // the engine does not know the result
      rig.engine.reset_statistics();
    }
  }
  const ResidencyStatistics figures = rig.engine.statistics();
  CHECK_EQ(figures.over_budget, 0);
  CHECK(figures.written_back.bytes < static_cast<std::int64_t>(kLarge)); // no operand has left
  CHECK(figures.fetched.count > 0); // the others have, and come back
}

TEST(a_storage_without_room_is_created_on_the_host_and_moves_once_there_is_room) {
  Rig rig;
  rig.engine.set_budget(0, kBudget, /*ceiling=*/kBudget);
  train(rig, 4, 1); // fills the budget
  for (const auto& storage : rig.storages) {
    const Engine::Lock lock(rig.engine);
    CHECK(rig.engine.pin(storage->record, kStream));
  }
  const auto [never_used, unused] = rig.engine.create_on_host(kBytes, 0, kStream);
  const auto [record, ptr] = rig.engine.create_on_host(kBytes, 0, kStream);
  CHECK(record != nullptr && never_used != nullptr && unused != ptr);
  CHECK_EQ(rig.engine.statistics().over_budget, 2);
  CHECK(rig.engine.created_on_host_at(ptr) == record && rig.engine.created_on_host_at(&rig) == nullptr);
  rig.check_engine();
  rig.engine.destroyed(never_used);

  rig.storages.push_back(std::make_unique<Storage>());
  Storage& made = *rig.storages.back();
  made.ptr = static_cast<unsigned char*>(ptr);
  made.record = record;
  {
    const Engine::Lock lock(rig.engine);
    rig.engine.attach(*record, &made);
  }
  rig.run(50, {&made}, true, [&] { Rig::write(made, 77); });
  CHECK(made.block == nullptr && made.ptr == ptr); // in place
  {
    const Engine::Lock lock(rig.engine);
    rig.engine.unpin(rig.storages[0]->record);
  }
  rig.run(51, {&made}, false, [&] { Rig::check(made); });
  CHECK(made.block != nullptr);
  CHECK(rig.reserved() <= static_cast<std::int64_t>(kBudget));
  rig.check_engine();
  for (std::size_t index = 1; index < 4; ++index) {
    const Engine::Lock lock(rig.engine);
    rig.engine.unpin(rig.storages[index]->record);
  }
}

} // namespace

HARNESS_MAIN()
