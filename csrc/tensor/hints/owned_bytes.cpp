#include "tensor/hints/owned_bytes.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <map>

#include "allocator/caching/block.h"
#include "tensor/storage/labels.h"
#include "tensor/storage/managed_storage.h"
#include "tensor/storage/user_allocators.h"

namespace torch_uvm {
namespace {

struct Dimension {
  std::size_t stride = 0; ///< bytes
  std::size_t size = 0;
};

/// Runs of `run` bytes, one for each index into the dimensions that leave gaps.
struct Grid {
  std::size_t run = 0;
  std::size_t count = 1; ///< saturates at kMaxRuns + 1
  c10::SmallVector<Dimension, 8> dimensions; ///< smallest stride first
};

Grid grid_of(const at::Tensor& tensor, std::size_t gap) {
  Grid grid;
  const std::size_t itemsize = tensor.itemsize();
  auto& dimensions = grid.dimensions;
  for (std::int64_t index = 0; index < tensor.dim(); ++index) {
    if (tensor.size(index) > 1 && tensor.stride(index) != 0) { // other dimensions add no bytes
      dimensions.push_back(
          {static_cast<std::size_t>(tensor.stride(index)) * itemsize, static_cast<std::size_t>(tensor.size(index))});
    }
  }
  std::ranges::sort(dimensions, {}, &Dimension::stride);
  // From the smallest stride up, each dimension that leaves no gap extends the run.
  grid.run = itemsize;
  auto outer = dimensions.begin();
  for (; outer != dimensions.end() && outer->stride < grid.run + std::max<std::size_t>(gap, 1); ++outer) {
    grid.run += (outer->size - 1) * outer->stride;
  }
  dimensions.erase(dimensions.begin(), outer);
  for (const Dimension& dimension : dimensions) {
    grid.count = std::min(grid.count * std::min(dimension.size, kMaxRuns + 1), kMaxRuns + 1);
  }
  return grid;
}

} // namespace

Ranges runs_of(const at::Tensor& tensor, std::size_t gap) {
  if (tensor.numel() == 0) {
    return {};
  }
  const Grid grid = grid_of(tensor, gap);
  const auto storage = reinterpret_cast<std::uintptr_t>(data_of(tensor.storage()).get());
  const Range all{storage, storage + tensor.storage().nbytes()};
  std::uintptr_t begin = storage + static_cast<std::size_t>(tensor.storage_offset()) * tensor.itemsize();
  c10::SmallVector<std::size_t, 8> position(grid.dimensions.size(), 0);
  const std::size_t count = std::min(grid.count, kMaxRuns);
  Ranges runs;
  runs.reserve(count);
  for (std::size_t made = 0; made < count; ++made) {
    // Clamp to the storage: it may have been shrunk after the tensor was made.
    runs.push_back({std::max(begin, all.begin), std::min(begin + grid.run, all.end)});
    for (std::size_t index = 0; index < position.size(); ++index) {
      const Dimension& dimension = grid.dimensions[index];
      begin += dimension.stride;
      if (++position[index] < dimension.size) {
        break;
      }
      begin -= dimension.stride * dimension.size;
      position[index] = 0;
    }
  }
  normalise(runs); // with overlapping strides the runs are unsorted and overlap
  return runs;
}

bool has_too_many_runs(const at::Tensor& tensor) {
  return tensor.numel() != 0 && grid_of(tensor, 0).count > kMaxRuns;
}

std::vector<Owned> owned_bytes(const std::vector<at::Tensor>& tensors, std::size_t gap) {
  std::map<std::uintptr_t, Owned> by_address;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.layout() != c10::kStrided || !tensor.has_storage() || !is_managed(data_of(tensor.storage()))) {
      continue;
    }
    Block* const block = block_of(data_of(tensor.storage()));
    Ranges runs = runs_of(tensor, gap);
    if (block == nullptr || runs.empty()) {
      continue;
    }
    const std::uintptr_t end =
        reinterpret_cast<std::uintptr_t>(data_of(tensor.storage()).get()) + tensor.storage().nbytes();
    if (runs.back().end == end && !is_from_allocator(data_behind_labels(data_of(tensor.storage())))) {
      runs.back().end = block->address + block->bytes; // include the padding
    }
    Owned& owned = by_address[block->address];
    owned.block = block;
    owned.bytes.insert(owned.bytes.end(), runs.begin(), runs.end());
  }
  std::vector<Owned> all;
  all.reserve(by_address.size());
  for (auto& [address, owned] : by_address) {
    normalise(owned.bytes);
    all.push_back(std::move(owned));
  }
  return all;
}

Ranges page_ranges(const std::vector<Owned>& owned, std::size_t page) {
  Ranges pages;
  Ranges joined; // of the current segment
  const Segment* segment = nullptr;
  const auto finish = [&] {
    normalise(joined);
    for (const Range& range : joined) {
      if (const Range whole = rounded_inwards(range, page); whole.bytes() != 0) {
        pages.push_back(whole);
      }
    }
    joined.clear();
  };
  for (const Owned& one : owned) {
    if (one.block->segment != segment) { // safe to read without a lock: constant while the block is allocated
      finish();
      segment = one.block->segment;
    }
    joined.insert(joined.end(), one.bytes.begin(), one.bytes.end());
  }
  finish();
  return pages;
}

} // namespace torch_uvm
