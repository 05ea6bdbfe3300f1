// Fuzzer of the allocator. Input bytes are operations on it, over the recording or the emulated runtime, with failing
// calls, limits, caps and held streams. Every structure is checked after each operation. The fuzzer checks the bytes
// that it wrote when it frees a block, and leaks at the end.
#include <cstring>
#include <memory>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "fuzz_input.h"
#include "recording/recording_runtime.h"
#include "runtime/bytes.h"
#include "runtime/emulated/emulated_runtime.h"

using namespace torch_uvm;

namespace {

constexpr std::size_t kMaxOperations = 300;
constexpr std::size_t kMaxLive = 64;
constexpr std::size_t kLimit = 256 * MiB;
constexpr int kDevices = 2;

struct Held {
  Block* block;
  std::size_t bytes;
  std::uint8_t mark;
};

class Machine {
 public:
  explicit Machine(fuzz::Input& input) : input_(input) {
    const std::uint8_t kind = input.byte();
    if ((kind & 1) != 0) {
      EmulatedConfig config;
      config.devices = kDevices;
      config.memory = 32 * MiB;
      if ((kind & 2) != 0) {
        config.schedule_seed = kind;
      }
      runtime_ = std::make_unique<EmulatedRuntime>(config);
    } else {
      auto recording = std::make_unique<RecordingRuntime>(kDevices);
      recording_ = recording.get();
      runtime_ = std::move(recording);
    }
    streams_ = {Stream::host(), Stream::default_of(0), Stream::default_of(1), runtime_->create_stream(0, 0),
                runtime_->create_stream(1, 0)};
    runtime_->set_limit(kLimit);
    allocator_ =
        std::make_unique<CachingManagedAllocator>(*runtime_, std::make_unique<ManagedSegmentSource>(*runtime_));
  }

  ~Machine() {
    if (recording_ != nullptr) {
      recording_->clear_failures();
      recording_->set_host_memory_available(kLimit);
    }
    while (!held_.empty()) {
      free_last();
    }
    check();
    allocator_->empty_cache();
    check();
    const Statistics statistics = allocator_->statistics();
    FUZZ_CHECK(statistics.allocation[0].current == 0);
    FUZZ_CHECK(statistics.reserved_bytes[0].current == 0);
    allocator_.reset();
    FUZZ_CHECK(runtime_->managed_bytes() == 0);
    for (const Stream stream : streams_) {
      if (stream.handle != nullptr) {
        runtime_->destroy_stream(stream);
      }
    }
    FUZZ_CHECK(recording_ == nullptr || recording_->live_objects() == 0);
  }

  void step() {
    try {
      operate();
    } catch (const OutOfMemory&) {
    } catch (const RuntimeFailure&) {
      FUZZ_CHECK(recording_ != nullptr); // only a call that was made to fail may fail
    } catch (const InvalidArgument&) {
    }
    check();
  }

 private:
  void operate() {
    switch (input_.below(16)) {
      case 0:
      case 1:
      case 2:
        return allocate(false);
      case 3:
        return allocate(true);
      case 4:
      case 5:
        return pick() ? free_last() : void();
      case 6:
        return pick() ? free_after() : void();
      case 7:
        return pick() ? allocator_->record_stream(held_.back().block, stream()) : void();
      case 8:
        return pick() ? set_home() : void();
      case 9:
        return pick() ? allocator_->hand_over(held_.back().block, device_stream()) : void();
      case 10:
        allocator_->empty_cache();
        return;
      case 11:
        return set_bounds();
      case 12:
        return input_.below(2) == 0 ? slide() : reserve_moves();
      case 13:
        return ask();
      case 14:
        return set_options();
      default:
        return disturb();
    }
  }

  Stream stream() {
    return streams_[input_.below(streams_.size())];
  }
  Stream device_stream() {
    return streams_[1 + input_.below(streams_.size() - 1)];
  }
  std::size_t size() {
    return (std::size_t{input_.number<std::uint16_t>()} << input_.below(12)) + 1;
  }

  void allocate(bool try_only) {
    const Stream on = stream();
    const std::size_t bytes = size();
    if (held_.size() == kMaxLive) {
      return;
    }
    const Location home{on.device};
    Block* const block = try_only ? allocator_->try_allocate(bytes, home, on) : allocator_->allocate(bytes, home, on);
    FUZZ_CHECK(block != nullptr || try_only);
    if (block == nullptr) {
      return;
    }
    FUZZ_CHECK(allocator_->bytes(block) >= bytes);
    FUZZ_CHECK(allocator_->requested_bytes(block) == bytes);
    FUZZ_CHECK(allocator_->home(block) == home);
    held_.push_back({block, bytes, static_cast<std::uint8_t>(++marks_)});
    mark(held_.back());
    allocator_->set_tag(block, block);
  }

  void mark(const Held& held) {
    auto* const data = static_cast<std::uint8_t*>(allocator_->data(held.block));
    data[0] = data[held.bytes / 2] = data[held.bytes - 1] = held.mark;
  }
  void verify(const Held& held) {
    const auto* const data = static_cast<const std::uint8_t*>(allocator_->data(held.block));
    FUZZ_CHECK(data[0] == held.mark && data[held.bytes / 2] == held.mark && data[held.bytes - 1] == held.mark);
  }

  /// Swaps a random block to the end.
  bool pick() {
    if (held_.empty()) {
      return false;
    }
    std::swap(held_[input_.below(held_.size())], held_.back());
    return true;
  }

  void free_last() {
    verify(held_.back());
    FUZZ_CHECK(allocator_->find(allocator_->data(held_.back().block)) == held_.back().block);
    allocator_->free(held_.back().block);
    held_.pop_back();
  }

  void free_after() {
    Block* const block = held_.back().block;
    if (allocator_->home(block).is_host()) {
      return;
    }
    const Stream on = device_stream();
    const Event event = runtime_->create_event(on.device, false);
    try {
      runtime_->record_event(event, on);
    } catch (...) {
      runtime_->destroy_event(event);
      throw;
    }
    verify(held_.back());
    held_.pop_back();
    allocator_->free_after(block, event, on);
  }

  void set_home() {
    const Stream to = stream();
    allocator_->set_home(held_.back().block, Location{to.device}, to);
  }

  void set_bounds() {
    const int device = static_cast<int>(input_.below(kDevices));
    const std::size_t bytes = input_.below(64) * MiB;
    switch (input_.below(4)) {
      case 0:
        runtime_->set_limit(bytes);
        break;
      case 1:
        runtime_->set_limit(kLimit);
        break;
      case 2:
        allocator_->set_cap(device, bytes);
        break;
      default:
        allocator_->set_cap(device, std::nullopt);
    }
  }

  double cost(void* tag, std::size_t bytes) {
    for (const Held& held : held_) {
      if (held.block == tag) {
        return held.mark % 4 == 0 ? kNever : static_cast<double>(bytes);
      }
    }
    fuzz::fail(__FILE__, __LINE__, "a tag that nobody has set");
  }

  /// Commits or rolls back each reserved move, as the input decides.
  void reserve_moves() {
    const Stream on = device_stream();
    const auto moves = allocator_->reserve_moves(
        size(), on.device, on, [&](void* tag, std::size_t bytes) { return cost(tag, bytes); },
        [&](void* /*tag*/) { return input_.below(8) != 0; });
    for (const auto& move : moves) {
      finish(move);
    }
  }

  void slide() {
    const Stream on = device_stream();
    const auto slides =
        allocator_->find_slides(size(), on.device, [&](void* tag, std::size_t bytes) { return cost(tag, bytes); });
    for (const auto& step : slides ? slides->steps : decltype(slides->steps){}) {
      if (const auto move = allocator_->slide(static_cast<Block*>(step.tag), step.up, on)) {
        finish(*move);
      }
    }
  }

  void finish(const CachingManagedAllocator::Move& move) {
    for (Held& held : held_) {
      if (held.block != move.from) {
        continue;
      }
      FUZZ_CHECK(move.tag == held.block);
      if (input_.below(3) == 0) {
        allocator_->roll_back(move);
        return;
      }
      FUZZ_CHECK(allocator_->bytes(move.to) >= held.bytes);
      std::memmove(allocator_->data(move.to), move.source, held.bytes);
      allocator_->commit(move);
      held.block = move.to;
      allocator_->set_tag(held.block, held.block);
      verify(held);
      return;
    }
  }

  void ask() {
    const int device = static_cast<int>(input_.below(kDevices));
    const auto run = allocator_->min_cost_range(size(), device, [&](void* tag, std::size_t b) { return cost(tag, b); });
    for (void* const tag : run.value_or(std::vector<void*>())) {
      FUZZ_CHECK(cost(tag, 1) == 1);
    }
    if (!held_.empty()) {
      FUZZ_CHECK(!allocator_->streams(held_.back().block).empty() || allocator_->home(held_.back().block).is_host());
    }
    static_cast<void>(allocator_->snapshot());
    static_cast<void>(allocator_->take_allocated_peak(device));
    allocator_->reset_peak_statistics();
  }

  void set_options() {
    AllocatorOptions options = allocator_->options();
    if (input_.below(3) == 0) {
      options.populate = !options.populate;
    } else {
      options.segment_min_bytes = input_.below(2) == 0 ? std::nullopt : std::optional(input_.below(64) * MiB);
    }
    allocator_->set_options(options);
  }

  /// Queues work, makes calls fail, reduces host memory; on the emulated runtime, waits for work.
  void disturb() {
    const Stream on = device_stream();
    if (recording_ == nullptr) {
      runtime_->synchronize_stream(on);
      return;
    }
    switch (input_.below(5)) {
      case 0:
        return recording_->hold(on);
      case 1:
        return recording_->release(on);
      case 2:
        return recording_->fail("*", 1 + input_.below(8));
      case 3:
        return recording_->clear_failures();
      default:
        recording_->set_host_memory_available(input_.below(2) == 0 ? kLimit : input_.below(32) * MiB);
    }
  }

  void check() {
    if (const auto wrong = allocator_->check()) {
      fuzz::fail(__FILE__, __LINE__, *wrong);
    }
    FUZZ_CHECK(runtime_->managed_bytes() <= kLimit);
  }

  fuzz::Input& input_;
  std::unique_ptr<ManagedRuntime> runtime_;
  RecordingRuntime* recording_ = nullptr;
  std::unique_ptr<CachingManagedAllocator> allocator_;
  std::vector<Stream> streams_;
  std::vector<Held> held_;
  unsigned marks_ = 0;
};

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  Machine machine(input);
  for (std::size_t left = kMaxOperations; left > 0 && !input.empty(); --left) {
    machine.step();
  }
  return 0;
}
