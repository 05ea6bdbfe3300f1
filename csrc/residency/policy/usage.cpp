#include "residency/policy/usage.h"

#include <algorithm>

namespace torch_uvm::scheduling {

Usage::Usage(const std::vector<std::size_t>& bytes) : size_(static_cast<std::uint32_t>(bytes.size())) {
  while (leaves_ < size_) {
    leaves_ *= 2;
  }
  most_.assign(2 * static_cast<std::size_t>(leaves_), 0);
  added_.assign(most_.size(), 0);
  for (std::uint32_t at = 0; at < size_; ++at) {
    most_[leaves_ + at] = static_cast<std::int64_t>(bytes[at]);
  }
  for (std::size_t node = leaves_ - 1; node >= 1; --node) {
    most_[node] = std::max(most_[2 * node], most_[2 * node + 1]);
  }
}

void Usage::add(std::uint32_t begin, std::uint32_t count, std::int64_t bytes) {
  if (count == 0) {
    return;
  }
  const std::uint32_t until_the_end = std::min(count, size_ - begin);
  add(1, 0, leaves_, begin, begin + until_the_end, bytes);
  if (count > until_the_end) {
    add(1, 0, leaves_, 0, count - until_the_end, bytes);
  }
}

void Usage::add(std::size_t node, std::uint32_t low, std::uint32_t high, std::uint32_t begin, std::uint32_t end,
                std::int64_t bytes) {
  if (begin <= low && high <= end) {
    most_[node] += bytes;
    added_[node] += bytes;
    return;
  }
  const std::uint32_t middle = low + (high - low) / 2;
  if (begin < middle) {
    add(2 * node, low, middle, begin, end, bytes);
  }
  if (end > middle) {
    add(2 * node + 1, middle, high, begin, end, bytes);
  }
  most_[node] = std::max(most_[2 * node], most_[2 * node + 1]) + added_[node];
}

std::int64_t Usage::last_above(std::size_t node, std::uint32_t low, std::uint32_t high, std::uint32_t begin,
                               std::uint32_t end, std::int64_t bound) const {
  if (most_[node] <= bound || begin >= high || end <= low) {
    return -1;
  }
  if (high - low == 1) {
    return low;
  }
  const std::uint32_t middle = low + (high - low) / 2;
  const std::int64_t rest = bound - added_[node];
  const std::int64_t right = last_above(2 * node + 1, middle, high, begin, end, rest);
  return right >= 0 ? right : last_above(2 * node, low, middle, begin, end, rest);
}

std::uint32_t Usage::fits_before(std::uint32_t end, std::uint32_t count, std::int64_t bound) const {
  const std::uint32_t from_the_start = std::min(count, end);
  const std::int64_t found = last_above(1, 0, leaves_, end - from_the_start, end, bound);
  if (found >= 0) {
    return end - static_cast<std::uint32_t>(found) - 1;
  }
  if (count == from_the_start) {
    return count;
  }
  const std::uint32_t rest = count - from_the_start;
  const std::int64_t wrapped = last_above(1, 0, leaves_, size_ - rest, size_, bound);
  return wrapped >= 0 ? from_the_start + size_ - static_cast<std::uint32_t>(wrapped) - 1 : count;
}

} // namespace torch_uvm::scheduling
