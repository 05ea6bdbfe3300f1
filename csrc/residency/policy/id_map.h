// Values by 64-bit ids, and how the bits of an id are mixed.
#pragma once

#include <cstdint>
#include <unordered_map>

namespace torch_uvm {

/// Mixes the bits of a number, so that similar keys get unrelated hashes.
constexpr std::uint64_t mix_bits(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

/// A pointer to a value is valid until that value is erased.
template <typename V>
class IdMap : public std::unordered_map<std::uint64_t, V> {
 public:
  /// nullptr: there is none.
  V* find(std::uint64_t id) {
    const auto found = std::unordered_map<std::uint64_t, V>::find(id);
    return found == this->end() ? nullptr : &found->second;
  }
  const V* find(std::uint64_t id) const {
    return const_cast<IdMap*>(this)->find(id);
  }
};

} // namespace torch_uvm
