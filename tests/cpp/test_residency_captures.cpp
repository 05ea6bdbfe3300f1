// Storages that graphs have captured are unmovable. Allocations of a compiled graph between its kernels may exceed the
// budget.
#include "residency_rig.h"

namespace {

using namespace residency;

/// Adds an operator on the storage to the graph that is being captured.
void capture(Rig& rig, Storage& storage, bool writes) {
  const Engine::Lock lock(rig.engine);
  if (storage.record == nullptr) {
    storage.record = rig.engine.adopt(storage.block, 0, &storage);
  }
  const Engine::Operand operand{storage.record, writes};
  rig.engine.captured({&operand, 1});
}

TEST(captured_storages_stay_until_their_graphs_are_released) {
  Rig rig;
  Storage& captured = rig.make(1);
  const std::uint64_t graph = rig.engine.begin_capture();
  const std::uint64_t other = rig.engine.begin_capture();
  capture(rig, captured, true);
  rig.engine.end_capture(other);
  rig.engine.end_capture(graph);
  CHECK(!rig.engine.has_open_captures());
  const unsigned char* const address = captured.ptr;
  train(rig, 7, 3);
  CHECK(captured.ptr == address);
  rig.write(captured, 9); // a launch of the graph, which the engine does not see
  rig.engine.release_capture(graph);
  rig.engine.release_capture(graph);
  for (std::size_t index = 1; index < rig.storages.size(); ++index) {
    rig.run(40, {rig.storages[index].get()}, true, [] {});
  }
  CHECK(captured.ptr == address); // the other graph may have captured it
  rig.engine.release_capture(other);
  for (std::size_t index = 1; index < rig.storages.size(); ++index) {
    rig.run(40, {rig.storages[index].get()}, true, [] {});
  }
  CHECK(captured.block == nullptr);
  Rig::check(captured);
  train(rig, 0, 2);
}

TEST(a_storage_captured_on_the_host_stays_there) {
  Rig rig;
  train(rig, 8, 2);
  Storage* captured = nullptr;
  for (const auto& storage : rig.storages) {
    captured = storage->block == nullptr ? storage.get() : captured;
  }
  CHECK(captured != nullptr);
  const std::uint64_t graph = rig.engine.begin_capture();
  capture(rig, *captured, true);
  rig.engine.end_capture(graph);
  const unsigned char* const address = captured->ptr;
  train(rig, 0, 3);
  CHECK(captured->ptr == address);
  {
    const Engine::Lock lock(rig.engine);
    rig.engine.pin(captured->record, kStream);
    rig.engine.unpin(captured->record);
  }
  rig.engine.set_budget(0, std::nullopt); // fetches everything that may be moved
  CHECK(captured->ptr == address);
  rig.engine.set_budget(0, kBudget);
  rig.engine.release_capture(graph);
  rig.run(41, {captured}, false, [&] { Rig::check(*captured); });
  CHECK(captured->block != nullptr);
}

TEST(a_graph_captured_without_a_budget_keeps_its_addresses) {
  Rig rig;
  rig.engine.set_budget(0, std::nullopt);
  Storage& captured = rig.make(1);
  CHECK(captured.record == nullptr);
  const std::uint64_t graph = rig.engine.begin_capture();
  capture(rig, captured, false);
  rig.engine.end_capture(graph);
  rig.engine.set_budget(0, kBudget);
  const unsigned char* const address = captured.ptr;
  train(rig, 7, 3);
  CHECK(captured.ptr == address);
  rig.engine.release_capture(graph);
}

TEST(an_eviction_waits_for_the_last_launch_of_a_released_graph) {
  Rig rig;
  Storage& captured = rig.make(1);
  const std::uint64_t graph = rig.engine.begin_capture();
  capture(rig, captured, true);
  rig.engine.end_capture(graph);
  const Stream launches = rig.runtime.create_stream(0, 0);
  for (int launch = 0; launch < 2; ++launch) {
    rig.engine.launched(graph, launches);
  }
  rig.engine.release_capture(graph);
  rig.runtime.hold(launches);
  const Event launched = rig.runtime.create_event(0, false);
  rig.runtime.record_event(launched, launches); // not reached: the launch is still running
  rig.runtime.clear_calls();
  train(rig, 7, 3);
  bool ordered = false;
  for (const RecordedCall& call : rig.runtime.calls()) {
    ordered = ordered || (call.name == "record_event" && call.stream == launches);
  }
  CHECK(ordered);
  rig.runtime.release(launches);
  rig.runtime.destroy_event(launched);
}

/// A capture makes operators of all devices known to the engine.
TEST(an_operator_on_a_device_without_a_budget_runs_beside_a_capture) {
  RecordingRuntime runtime;
  CachingManagedAllocator memory{runtime, std::make_unique<ManagedSegmentSource>(runtime)};
  Adapter adapter{memory};
  const std::unique_ptr<Engine> engine = std::make_unique<Engine>(runtime, memory, adapter);
  const std::uint64_t graph = engine->begin_capture();
  Storage storage;
  storage.block = memory.allocate(kBytes, Location::device(0), kStream);
  {
    const Engine::Lock lock(*engine);
    storage.record = engine->adopt(storage.block, 0, &storage);
    Engine::Frame frame;
    const Engine::Operand operand{storage.record, true};
    engine->begin(frame, {1, "test", false, false, false}, {&operand, 1}, {kStream});
    engine->end(frame);
  }
  engine->release_capture(graph);
  engine->destroyed(storage.record);
  memory.free(storage.block);
  engine->freed();
  CHECK(!engine->check());
}

TEST(a_compiled_graph_may_exceed_the_budget_by_its_intermediates) {
  Rig rig;
  Storage& input = rig.make(1);
  Engine::Frame frame;
  Block* between[4] = {};
  const auto allocate = [&](Block*& block) { block = rig.memory.allocate(kBytes, Location::device(0), kStream); };
  {
    const Engine::Lock lock(rig.engine);
    const Engine::Operand operand{input.record, false};
    rig.engine.begin(frame, {50, "graph", false, false, /*region=*/true}, {&operand, 1}, rig.streams);
  }
  for (Block*& block : between) {
    allocate(block);
  }
  for (Block*& block : between) {
    rig.memory.free(block);
  }
  {
    const Engine::Lock lock(rig.engine);
    rig.engine.end(frame);
  }
  CHECK(rig.engine.statistics().over_budget == 1);
  CHECK(rig.reserved() <= static_cast<std::int64_t>(kBudget));
}

} // namespace

HARNESS_MAIN()
