// A contiguous hash table with 64-bit keys, for lookups on every operand of every operator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace torch_uvm {

/// Mixes the bits of a number, so that similar keys get unrelated hashes.
constexpr std::uint64_t mix_bits(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

/// Open addressing with linear probing. Pointers to values are valid until the next insertion or removal.
template <typename V>
class FlatMap {
 public:
  static constexpr std::uint64_t kNoKey = ~std::uint64_t{0}; ///< may not be inserted

  V* find(std::uint64_t key) {
    const std::size_t at = position(key);
    return at == kNowhere ? nullptr : &slots_[at].second;
  }
  const V* find(std::uint64_t key) const {
    return const_cast<FlatMap*>(this)->find(key);
  }

  /// The value of `key`; inserts a default one if there is none.
  V& operator[](std::uint64_t key) {
    if (V* found = find(key)) {
      return *found;
    }
    if (2 * (count_ + 1) > slots_.size()) {
      grow();
    }
    ++count_;
    std::size_t at = home(key);
    while (slots_[at].first != kNoKey) {
      at = next(at);
    }
    slots_[at] = {key, V{}};
    return slots_[at].second;
  }

  void erase(std::uint64_t key) {
    std::size_t hole = position(key);
    if (hole == kNowhere) {
      return;
    }
    --count_;
    // Shift entries that were probed past the hole back into it, so that no lookup stops early.
    for (std::size_t at = next(hole); slots_[at].first != kNoKey; at = next(at)) {
      const std::size_t wanted = home(slots_[at].first);
      if (((at - wanted) & (slots_.size() - 1)) >= ((at - hole) & (slots_.size() - 1))) {
        slots_[hole] = std::move(slots_[at]);
        hole = at;
      }
    }
    slots_[hole] = {kNoKey, V{}};
  }

  std::size_t size() const {
    return count_;
  }
  /// Iterates over the pairs, unordered.
  class Iterator {
   public:
    Iterator(const std::pair<std::uint64_t, V>* at, const std::pair<std::uint64_t, V>* end) : at_(at), end_(end) {
      skip();
    }
    const std::pair<std::uint64_t, V>& operator*() const {
      return *at_;
    }
    Iterator& operator++() {
      ++at_;
      skip();
      return *this;
    }
    bool operator!=(const Iterator& other) const {
      return at_ != other.at_;
    }

   private:
    void skip() {
      while (at_ != end_ && at_->first == kNoKey) {
        ++at_;
      }
    }
    const std::pair<std::uint64_t, V>* at_;
    const std::pair<std::uint64_t, V>* end_;
  };
  Iterator begin() const {
    return {slots_.data(), slots_.data() + slots_.size()};
  }
  Iterator end() const {
    return {slots_.data() + slots_.size(), slots_.data() + slots_.size()};
  }

 private:
  static constexpr std::size_t kNowhere = ~std::size_t{0};

  std::size_t position(std::uint64_t key) const {
    if (slots_.empty()) {
      return kNowhere;
    }
    for (std::size_t at = home(key);; at = next(at)) {
      if (slots_[at].first == key) {
        return at;
      }
      if (slots_[at].first == kNoKey) {
        return kNowhere;
      }
    }
  }
  std::size_t home(std::uint64_t key) const {
    return mix_bits(key) & (slots_.size() - 1);
  }
  std::size_t next(std::size_t at) const {
    return (at + 1) & (slots_.size() - 1);
  }
  void grow() {
    std::vector<std::pair<std::uint64_t, V>> old(slots_.empty() ? 16 : 2 * slots_.size(), {kNoKey, V{}});
    old.swap(slots_);
    for (auto& slot : old) {
      if (slot.first != kNoKey) {
        std::size_t at = home(slot.first);
        while (slots_[at].first != kNoKey) {
          at = next(at);
        }
        slots_[at] = std::move(slot);
      }
    }
  }

  std::vector<std::pair<std::uint64_t, V>> slots_;
  std::size_t count_ = 0;
};

} // namespace torch_uvm
