// Bytes in use at each operator of an iteration: a segment tree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_uvm::scheduling {

/// Adds to ranges and finds the nearest operator above a bound, each in logarithmic time. Ranges are cyclic.
class Usage {
 public:
  explicit Usage(const std::vector<std::size_t>& bytes);

  /// Adds `bytes` to `count` operators, starting at `begin`.
  void add(std::uint32_t begin, std::uint32_t count, std::int64_t bytes);
  /// Number of consecutive operators right before `end`, at most `count`, that use no more than `bound` each.
  std::uint32_t fits_before(std::uint32_t end, std::uint32_t count, std::int64_t bound) const;

 private:
  void add(std::size_t node, std::uint32_t low, std::uint32_t high, std::uint32_t begin, std::uint32_t end,
           std::int64_t bytes);
  /// The last operator in [begin, end) above `bound`; -1: none.
  std::int64_t last_above(std::size_t node, std::uint32_t low, std::uint32_t high, std::uint32_t begin,
                          std::uint32_t end, std::int64_t bound) const;

  std::uint32_t size_;
  std::uint32_t leaves_ = 1;
  std::vector<std::int64_t> most_; ///< maximum of the node's range, without additions at its ancestors
  std::vector<std::int64_t> added_; ///< additions to the node's whole range
};

} // namespace torch_uvm::scheduling
