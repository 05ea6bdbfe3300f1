// Where the library last placed the bytes of tensors.
#include <algorithm>
#include <map>
#include <optional>

#include "tensor/hints/hints.h"
#include "tensor/hints/owned_bytes.h"
#include "tensor/process/context.h"
#include "tensor/process/machine.h"
#include "tensor/process/process_engine.h"
#include "tensor/storage/advice_registry.h"
#include "tensor/storage/block_storage.h"
#include "tensor/storage/labels.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm {
namespace {

using Places = std::vector<std::pair<c10::Device, std::size_t>>;

void add(Places& places, c10::Device device, std::size_t bytes) {
  if (bytes == 0) {
    return;
  }
  const auto found = std::ranges::find(places, device, &Places::value_type::first);
  found == places.end() ? void(places.emplace_back(device, bytes)) : void(found->second += bytes);
}

/// Of a tensor with too many runs, gaps below this count as its bytes.
constexpr std::size_t kCoarse = std::size_t{64} << 10;

/// The bytes of one storage that the call covers.
struct Asked {
  const at::Tensor* first = nullptr;
  Ranges runs;
};

using ByLocation = std::map<Location, std::size_t>;

/// Adds a range's bytes by the last prefetch location of each page, or by the block's home for pages without one.
/// Bisects while the runtime has no one answer for the range.
void count_places(Range range, std::size_t page, Location home, ByLocation& places) {
  const RangeAttributes attributes = Context::get().runtime().range_attributes(range.data(), range.bytes());
  const std::uintptr_t middle = (range.begin + range.bytes() / 2) / page * page;
  if (attributes.last_prefetch) {
    places[*attributes.last_prefetch] += range.bytes();
  } else if (attributes.uniform || rounded_outwards(range, page).bytes() <= page) {
    places[home] += range.bytes();
  } else {
    const std::uintptr_t cut = middle > range.begin ? middle : range.begin / page * page + page;
    count_places({range.begin, cut}, page, home, places);
    count_places({cut, range.end}, page, home, places);
  }
}

ByLocation places_of(Block* block, const Ranges& runs) {
  ByLocation places;
  const Location home = Context::get().managed_allocator().home(block);
  // Without a recorded prefetch, use the home: the runtime may still report a prefetch from before the pages were
  // reused for this block.
  const bool prefetched = has_prefetch(block);
  for (const Range& run : runs) {
    if (prefetched) {
      count_places(run, Machine::get().page_bytes, home, places);
    } else {
      places[home] += run.bytes();
    }
  }
  return places;
}

/// By address, which labels of one block share.
std::map<const void*, Asked> by_storage(const std::vector<at::Tensor>& tensors) {
  std::map<const void*, Asked> asked;
  for (const at::Tensor& tensor : tensors) {
    if (has_bytes(tensor) && tensor.numel() != 0) {
      Asked& one = asked[data_of(tensor.storage()).get()];
      one.first = one.first == nullptr ? &tensor : one.first;
      const Ranges runs = runs_of(tensor, has_too_many_runs(tensor) ? kCoarse : 0);
      one.runs.insert(one.runs.end(), runs.begin(), runs.end());
      normalise(one.runs);
    }
  }
  return asked;
}

} // namespace

bool has_bytes(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && !tensor.is_nested() && tensor.has_storage() &&
         !tensor.storage().device().is_meta() &&
         (tensor.storage().nbytes() == 0 || data_of(tensor.storage()).get() != nullptr);
}

Places residency(const std::vector<at::Tensor>& tensors) {
  const std::optional<Engine::Lock> lock = lock_engine();
  Places places;
  for (const auto& [address, asked] : by_storage(tensors)) {
    Block* const block = Context::get().forked() || !is_managed(data_of(asked.first->storage()))
                             ? nullptr
                             : block_of(data_of(asked.first->storage()));
    if (block == nullptr) {
      std::size_t bytes = 0;
      for (const Range& run : asked.runs) {
        bytes += run.bytes();
      }
      const bool on_host = is_on_host(data_of(asked.first->storage()));
      add(places, on_host ? c10::Device(c10::DeviceType::CPU) : asked.first->device(), bytes);
      continue;
    }
    for (const auto& [place, bytes] : places_of(block, asked.runs)) {
      add(places, torch_device(place), bytes);
    }
  }
  return places;
}

} // namespace torch_uvm
