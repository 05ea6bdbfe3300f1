// A growing ring buffer of the latest elements, addressed by a monotonic index.
#pragma once

#include <cstdint>
#include <vector>

namespace torch_uvm {

/// Holds the elements with indices in [first(), end()). `push` takes amortised constant time.
template <typename T>
class Ring {
 public:
  std::uint64_t first() const {
    return first_;
  }
  std::uint64_t end() const {
    return end_;
  }
  T& operator[](std::uint64_t index) {
    return slots_[index & (slots_.size() - 1)];
  }
  const T& operator[](std::uint64_t index) const {
    return slots_[index & (slots_.size() - 1)];
  }
  void push(const T& value) {
    if (end_ - first_ == slots_.size()) {
      grow();
    }
    (*this)[end_++] = value;
  }
  void drop_before(std::uint64_t index) {
    first_ = index;
  }

 private:
  void grow() {
    std::vector<T> larger(slots_.empty() ? 64 : 2 * slots_.size()); // a power of two
    for (std::uint64_t index = first_; index < end_; ++index) {
      larger[index & (larger.size() - 1)] = (*this)[index];
    }
    slots_.swap(larger);
  }

  std::vector<T> slots_;
  std::uint64_t first_ = 0;
  std::uint64_t end_ = 0;
};

} // namespace torch_uvm
