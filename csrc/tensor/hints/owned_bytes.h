// Which bytes tensors reach, and which pages are all their own.
//
// - A tensor's runs come from its sizes and strides: neighbouring elements in one run, gaps between runs.
// - Runs of all the tensors that are asked about are united, across blocks that are neighbours in memory,
//   never across two segments: the runtime takes a range of one allocation.
// - What follows a storage in its block is padding, nobody's: it goes to whoever reaches the storage's end.
// - What is left is rounded inwards to whole pages. So no hint ever reaches a neighbour's page.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "tensor/storage/ranges.h"

namespace torch_uvm {

/// A tensor has at most this many runs here. Of a tensor with more, such as every second element of many,
/// the others are left out: they are too small to hold a page, or too many to call the runtime for.
inline constexpr std::size_t kMostRuns = std::size_t{1} << 16;

/// The bytes that a strided tensor's sizes and strides reach, within its storage.
/// \param gap gaps of fewer bytes are covered, too; with the page's size no page is covered of which
///        nothing is reached. 0 or 1: none
Ranges runs_of(const at::Tensor& tensor, std::size_t gap = 0);
/// Whether runs were left out.
bool has_too_many_runs(const at::Tensor& tensor);

/// What a set of tensors has of one block, padding included.
struct Owned {
  Block* block = nullptr;
  Ranges bytes;
};

/// Of managed tensors only; the others are passed over. By address of the blocks, each once.
std::vector<Owned> owned_bytes(const std::vector<at::Tensor>& tensors, std::size_t gap = 0);

/// The pages that are all theirs, united within each segment. Ranges of two segments may touch.
Ranges page_ranges(const std::vector<Owned>& owned, std::size_t page);

} // namespace torch_uvm
