// Bytes in use over the operators of a lap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_uvm::planning {

/// Adds to ranges and finds where a bound is passed, each in logarithmic time. Ranges are cyclic.
class Usage {
 public:
  explicit Usage(const std::vector<std::size_t>& bytes);

  /// To `count` operators from `begin` on.
  void add(std::uint32_t begin, std::uint32_t count, std::int64_t bytes);
  /// How many operators before `end`, at most `count`, in a row and up to it, use no more than `bound` each.
  std::uint32_t fits_before(std::uint32_t end, std::uint32_t count, std::int64_t bound) const;

 private:
  void add(std::size_t node, std::uint32_t low, std::uint32_t high, std::uint32_t begin, std::uint32_t end,
           std::int64_t bytes);
  /// The last operator in [begin, end) above `bound`; -1: none.
  std::int64_t last_above(std::size_t node, std::uint32_t low, std::uint32_t high, std::uint32_t begin,
                          std::uint32_t end, std::int64_t bound) const;

  std::uint32_t size_;
  std::uint32_t leaves_ = 1;
  std::vector<std::int64_t> most_; ///< of what is below, without what is added above
  std::vector<std::int64_t> added_; ///< to all below
};

} // namespace torch_uvm::planning
