// Captured graphs over storages that are address ranges: operands of each launch, and evicted between launches.
#include <cstring>
#include <vector>

#include "ranges_rig.h"
#include "runtime/testing/emulated_failures.h"

using namespace torch_uvm;
using namespace ranges_rig;

namespace {

struct Used {
  Storage* storage;
  bool writes;
};

/// Adds an operator to the graphs that are being captured.
void capture(Rig& rig, const std::vector<Used>& used) {
  const Engine::Lock lock(rig.engine);
  std::vector<Engine::Operand> operands;
  for (const auto& [storage, writes] : used) {
    operands.push_back({storage->record, writes});
  }
  rig.engine.captured(operands);
}

std::uint64_t graph_of(Rig& rig, const std::vector<Used>& used) {
  const std::uint64_t graph = rig.engine.begin_capture();
  capture(rig, used);
  rig.engine.end_capture(graph);
  return graph;
}

/// Launches the graph: `kernel` is its work. \return its operands
template <typename Kernel>
std::vector<Engine::Operand> launch(Rig& rig, std::uint64_t graph, Kernel kernel) {
  Engine::Frame frame;
  std::vector<Engine::Operand> operands;
  {
    const Engine::Lock lock(rig.engine);
    operands = rig.engine.launched(graph, kStream);
    rig.engine.begin(frame, {graph + 100, "captured graph", false, false, false, true}, operands, rig.streams);
  }
  rig.runtime.begin_kernel(kStream, {});
  kernel();
  rig.runtime.end_kernel(kStream, {});
  const Engine::Lock lock(rig.engine);
  rig.engine.end(frame);
  return operands;
}

} // namespace

TEST(a_captured_storage_keeps_its_memory_until_the_capture_ends) {
  Rig rig;
  Storage& captured = rig.make();
  rig.evict({&captured});
  const std::uint64_t graph = rig.engine.begin_capture();
  capture(rig, {{&captured, true}});
  rig.press();
  CHECK(captured.block != nullptr && captured.ptr == captured.address);
  rig.engine.end_capture(graph);
  rig.press();
  CHECK(captured.block == nullptr);
  rig.engine.release_capture(graph);
  rig.is_well();
}

TEST(a_launch_finds_its_bytes_and_what_it_writes_is_kept) {
  for (const Seed seed : kSeeds) {
    Rig rig(seed);
    Storage& written = rig.make();
    Storage& read = rig.make();
    const std::uint64_t graph = rig.engine.begin_capture();
    capture(rig, {{&written, false}, {&read, false}});
    capture(rig, {{&written, true}});
    rig.engine.end_capture(graph);
    for (int turn = 0; turn < 5; ++turn) {
      rig.press();
      CHECK(written.block == nullptr && read.block == nullptr);
      const std::vector<Engine::Operand> operands = launch(rig, graph, [&] {
        CHECK(Rig::is_right(written) && Rig::is_right(read));
        ++written.content;
        std::memset(written.address, written.content, written.bytes);
      });
      CHECK_EQ(operands.size(), 2U);
      for (const Engine::Operand& operand : operands) {
        CHECK_EQ(operand.writes, operand.record == written.record);
        CHECK(operand.record->is_in_range());
      }
      rig.is_well();
    }
    rig.engine.release_capture(graph);
    rig.press();
    rig.use({&written, &read});
    rig.is_well();
  }
}

TEST(an_eviction_waits_for_the_kernels_of_a_launch) {
  for (const Seed seed : kSeeds) {
    Rig rig(seed);
    Storage& written = rig.make();
    const std::uint64_t graph = graph_of(rig, {{&written, true}});
    launch(rig, graph, [&] { rig.runtime.zero_async(written.address, written.bytes, kStream); });
    written.content = 0;
    rig.press();
    CHECK(written.block == nullptr);
    rig.use({&written});
    rig.is_well();
    rig.engine.release_capture(graph);
  }
}

TEST(two_graphs_share_a_storage) {
  Rig rig;
  Storage& shared = rig.make();
  const std::uint64_t first = graph_of(rig, {{&shared, true}});
  const std::uint64_t second = graph_of(rig, {{&shared, false}});
  CHECK_EQ(shared.record->graphs, 2U);
  rig.engine.release_capture(first);
  rig.engine.release_capture(first);
  CHECK_EQ(shared.record->graphs, 1U);
  rig.press();
  launch(rig, second, [&] { CHECK(Rig::is_right(shared)); });
  rig.engine.release_capture(second);
  CHECK_EQ(shared.record->graphs, 0U);
  const Engine::Lock lock(rig.engine);
  CHECK(rig.engine.launched(second, kStream).empty());
}

TEST(a_storage_may_be_freed_before_its_graph) {
  Rig rig;
  Storage& freed = rig.make();
  Storage& kept = rig.make();
  const std::uint64_t graph = graph_of(rig, {{&freed, true}, {&kept, true}});
  rig.press();
  rig.free(freed);
  CHECK_EQ(launch(rig, graph, [&] { CHECK(Rig::is_right(kept)); }).size(), 1U);
  rig.free(kept);
  CHECK(launch(rig, graph, [] {}).empty());
  rig.engine.release_capture(graph);
  rig.free_all();
}

TEST(operands_that_do_not_fit_exceed_the_budget_for_one_launch) {
  Rig rig;
  std::vector<Used> used;
  for (std::size_t count = 0; count < kBudget / kBytes + 2; ++count) {
    used.push_back({&rig.make(), true});
  }
  const std::uint64_t graph = rig.engine.begin_capture();
  for (const Used& each : used) {
    capture(rig, {each}); // the last ones exceed the budget, as the others are pinned until the capture ends
  }
  rig.engine.end_capture(graph);
  for (int turn = 0; turn < 3; ++turn) {
    launch(rig, graph, [&] {
      for (const Used& each : used) {
        CHECK(each.storage->ptr == each.storage->address && Rig::is_right(*each.storage));
      }
    });
    CHECK(rig.memory.levels(Location::device(0)).reserved_bytes[0] <= static_cast<std::int64_t>(kBudget));
  }
  CHECK(rig.engine.statistics().over_budget >= 3);
  rig.engine.release_capture(graph);
  rig.is_well(/*within=*/false);
}

TEST(without_device_memory_an_operand_is_used_in_pinned_memory_at_its_address) {
  Rig rig;
  Storage& captured = rig.make();
  const std::uint64_t graph = graph_of(rig, {{&captured, true}});
  void* const other = rig.evict_and_fill_device(captured);
  for (int turn = 0; turn < 2; ++turn) {
    const std::vector<Engine::Operand> operands = launch(rig, graph, [&] {
      CHECK(captured.ptr == captured.address && Rig::is_right(captured));
      std::memset(captured.ptr, ++captured.content, captured.bytes);
    });
    CHECK(operands.front().record->is_in_range() && captured.block == nullptr);
  }
  rig.runtime.free_device(other);
  launch(rig, graph, [&] { CHECK(captured.ptr == captured.address && Rig::is_right(captured)); });
  CHECK(captured.block != nullptr);
  rig.engine.release_capture(graph);
  rig.is_well(/*within=*/false);
}

/// The caller sees it and does not launch the graph.
TEST(without_a_mapping_an_operand_is_not_in_its_range) {
  Rig rig;
  Storage& captured = rig.make();
  const std::uint64_t graph = graph_of(rig, {{&captured, true}});
  void* const other = rig.evict_and_fill_device(captured);
  EmulatedFailures failures(rig.runtime);
  failures.fail("map", 1);
  for (int turn = 0; turn < 2; ++turn) {
    CHECK(!launch(rig, graph, [] {}).front().record->is_in_range());
    CHECK(!rig.engine.check());
  }
  rig.runtime.free_device(other);
  const std::vector<Engine::Operand> operands = launch(rig, graph, [&] { CHECK(Rig::is_right(captured)); });
  CHECK(operands.front().record->is_in_range() && captured.ptr == captured.address);
  rig.engine.release_capture(graph);
}

HARNESS_MAIN()
