// The bytes that a set of tensors covers, and the whole pages that belong to them alone.
//
// - A tensor's sizes and strides give its runs: maximal contiguous ranges of elements.
// - The runs of all given tensors are united, across adjacent blocks but never across segments: the runtime accepts
//   only a range within one allocation.
// - The padding after a storage in its block belongs to the tensor that covers the storage's end.
// - The result is rounded inwards to whole pages, so a hint never touches a page of another tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "tensor/storage/ranges.h"

namespace torch_uvm {

/// The maximum number of runs per tensor. The runs beyond it (of a tensor of every second element, for example) are
/// left out: they are too small to contain a page, or too many for calls of the runtime.
inline constexpr std::size_t kMaxRuns = std::size_t{1} << 16;

/// The bytes that a strided tensor's elements occupy, within its storage.
/// \param gap gaps of fewer bytes than this are covered as well. With `gap` equal to the page size, every covered page
///        still has bytes of the tensor. 0 or 1: no gap is covered
Ranges runs_of(const at::Tensor& tensor, std::size_t gap = 0);
/// Whether `runs_of` leaves out runs of the tensor.
bool has_too_many_runs(const at::Tensor& tensor);

/// The bytes of one block that a set of tensors covers, including padding.
struct Owned {
  Block* block = nullptr;
  Ranges bytes;
};

/// The covered bytes of each block, sorted by the block's address. Skips tensors that are not managed.
std::vector<Owned> owned_bytes(const std::vector<at::Tensor>& tensors, std::size_t gap = 0);

/// The whole pages that the tensors cover, united within each segment. Ranges of different segments may be adjacent.
Ranges page_ranges(const std::vector<Owned>& owned, std::size_t page);

} // namespace torch_uvm
