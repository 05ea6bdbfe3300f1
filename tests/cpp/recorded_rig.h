// The allocator on the recording runtime with two streams. A test queues work and compares the recorded calls.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "allocator_rig.h"
#include "recording/recording_runtime.h"

namespace contract {

struct Recorded : Rig {
  explicit Recorded(AllocatorOptions options = apart())
      : Rig(std::make_unique<RecordingRuntime>(2), true, options),
        calls(static_cast<RecordingRuntime&>(*runtime)),
        a(stream()),
        b(stream()),
        work(runtime->create_event(0, false)) {
    calls.clear_calls();
  }
  ~Recorded() {
    runtime->destroy_event(work);
  }
  Recorded(Recorded&&) = delete;

  /// Queues work that does not begin.
  void keep_busy(Stream on) {
    calls.hold(on);
    runtime->record_event(work, on);
  }
  /// Allocates and frees a block on the stream, which leaves it in the cache together with its order.
  std::uintptr_t cache(std::size_t bytes, Stream on) {
    Block* const block = allocate(bytes, on);
    const std::uintptr_t at = address(block);
    allocator->free(block);
    calls.clear_calls();
    return at;
  }
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const RecordedCall& call : calls.calls()) {
      names.push_back(call.name);
    }
    return names;
  }
  void expect_calls(const std::vector<std::string>& expected) const {
    if (names() != expected) {
      std::string seen;
      for (const std::string& name : names()) {
        seen += " " + name;
      }
      harness::fail(__FILE__, __LINE__, "the calls were" + seen);
    }
  }

  RecordingRuntime& calls;
  Stream a, b;
  Event work;
};

inline BlockInfo::State state_at(const Rig& rig, std::uintptr_t address) {
  for (const SegmentInfo& segment : rig.allocator->snapshot()) {
    for (const BlockInfo& block : segment.blocks) {
      if (address - block.address < block.bytes) {
        return block.state;
      }
    }
  }
  throw harness::Failure("no block there");
}

} // namespace contract
