#include "tensor/hints/hints.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "tensor/hints/owned_bytes.h"
#include "tensor/process/context.h"
#include "tensor/process/machine.h"
#include "tensor/process/streams.h"
#include "tensor/storage/advice_registry.h"
#include "tensor/storage/labels.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm {
namespace {

Stream current_stream(int device) {
  return current_stream_of(torch_device(Location::device(device)));
}

/// The device that most likely has a block's bytes: the block's home, else the tensor's label, else the current device.
int device_of(Block* block, const at::Tensor& tensor) {
  const Location home = Context::get().managed_allocator().home(block);
  return !home.is_host()            ? home.index
         : tensor.device().is_cpu() ? c10::impl::VirtualGuardImpl(at::getAccelerator(true).value()).getDevice().index()
                                    : tensor.device().index();
}

Location location_of(c10::Device device) {
  const c10::Device resolved = resolve_device(device, "a hint about");
  return resolved.is_cpu() ? Location::host() : Location::device(resolved.index());
}

Block* managed_block(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && tensor.has_storage() && is_managed(data_of(tensor.storage()))
             ? block_of(data_of(tensor.storage()))
             : nullptr;
}

/// Tensors with the same target and stream, whose pages are united into common runtime calls.
struct Journey {
  Location to;
  Stream stream;
  std::vector<at::Tensor> tensors;
};

void add_to(std::vector<Journey>& journeys, Location to, Stream stream, const at::Tensor& tensor) {
  const auto same = std::ranges::find_if(
      journeys, [&](const Journey& journey) { return journey.to == to && journey.stream == stream; });
  Journey& journey = same == journeys.end() ? journeys.emplace_back(Journey{to, stream, {}}) : *same;
  journey.tensors.push_back(tensor);
}

/// Whether a block moves as a whole: all of it is owned by the tensors, and more than half of it is in prefetched
/// pages. If only part of it moves, that is recorded for `residency`.
bool moved(const Owned& owned, const Ranges& pages) {
  const Range all = range_of(owned.block);
  std::size_t bytes = 0;
  for (const Range& range : within(pages, all)) {
    bytes += range.bytes();
  }
  const bool whole = owned.bytes == Ranges{all} && bytes > all.bytes() / 2;
  if (bytes != 0 && !whole) {
    note_prefetch(owned.block);
  }
  return whole;
}

/// Queues the prefetches of one group. \return the blocks that move as a whole
std::vector<Block*> start(const Journey& journey) {
  if (!Machine::get().takes_hints(journey.to.is_host() ? journey.stream.device : journey.to.index)) {
    return {};
  }
  const std::size_t page = Machine::get().page_bytes;
  const std::vector<Owned> owned = owned_bytes(journey.tensors, page);
  const Ranges pages = page_ranges(owned, page);
  for (const Range& range : pages) {
    Context::get().runtime().prefetch(range.data(), range.bytes(), journey.to, journey.stream);
  }
  std::vector<Block*> whole;
  for (const Owned& one : owned) {
    if (moved(one, pages)) {
      whole.push_back(one.block);
    }
  }
  return whole;
}

} // namespace

void prefetch_range_of(const at::Tensor& tensor, Location to, Stream stream) {
  start({to, stream, {tensor}});
}

void prefetch(const std::vector<at::Tensor>& tensors, std::optional<c10::Device> device, std::optional<Stream> stream) {
  const std::optional<Location> common = device ? std::optional(location_of(*device)) : std::nullopt;
  if (Context::get().forked()) {
    return; // the pages belong to the parent, and in a child CUDA cannot tell the current stream
  }
  std::vector<Journey> journeys;
  for (const at::Tensor& tensor : tensors) {
    Block* const block = managed_block(tensor);
    if (block == nullptr || tensor.numel() == 0) {
      continue;
    }
    const Location to = common ? *common : location_of(tensor.device());
    const int driver = to.is_host() ? device_of(block, tensor) : to.index;
    add_to(journeys, to, stream ? *stream : current_stream(driver), tensor);
  }
  CachingManagedAllocator& allocator = Context::get().managed_allocator();
  for (const Journey& journey : journeys) {
    for (Block* const block : start(journey)) {
      // Keep the block's stream: its pending work is ordered by that stream. A block that only the host has used gets
      // the stream of the prefetch.
      const Stream owner = allocator.stream(block);
      allocator.set_home(block, journey.to, owner.is_host() && !journey.to.is_host() ? journey.stream : owner);
    }
  }
}

void discard(const std::vector<at::Tensor>& tensors) {
  if (Context::get().forked()) {
    return;
  }
  std::vector<Journey> journeys; // the target is the next writer: the host for a CPU label, else the label's device
  for (const at::Tensor& tensor : tensors) {
    if (Block* const block = managed_block(tensor); block != nullptr && tensor.numel() != 0) {
      const bool host = tensor.device().is_cpu();
      const int device = host ? device_of(block, tensor) : tensor.device().index();
      add_to(journeys, host ? Location::host() : Location::device(device), current_stream(device), tensor);
    }
  }
  ManagedRuntime& runtime = Context::get().runtime();
  for (const Journey& journey : journeys) {
    if (!Machine::get().takes_hints(journey.stream.device)) {
      continue;
    }
    // Do not cover gaps between runs: they are other tensors' contents.
    const std::vector<Owned> owned = owned_bytes(journey.tensors);
    const Ranges pages = page_ranges(owned, Machine::get().page_bytes);
    for (const Range& range : pages) {
      runtime.discard_before(journey.to, range.data(), range.bytes(), journey.stream);
    }
    if (pages.empty()) {
      continue;
    }
    if (journey.to.is_host()) {
      RecordedEvent(journey.stream).synchronize(); // the host writes next, and is not ordered by a stream
      continue;
    }
    // Otherwise the discard could run after the block is freed and reused.
    for (const Owned& one : owned) {
      Context::get().managed_allocator().record_stream(one.block, journey.stream);
    }
  }
}

} // namespace torch_uvm
