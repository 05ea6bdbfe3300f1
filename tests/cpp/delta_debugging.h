// Delta debugging (Zeller and Hildebrandt, 2002): finds a short part of a failing sequence that still fails.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

namespace soak {

/// \param fails whether a sequence fails; it must return true for the whole sequence
/// \param give_up called before each try; true ends the search with the best result so far
/// \return a failing part of the sequence, in its order. Unless the search was given up, no single element of it can be
/// left out.
template <typename Element>
std::vector<Element> minimise(
    std::vector<Element> sequence, const std::function<bool(const std::vector<Element>&)>& fails,
    const std::function<bool()>& give_up = [] { return false; }) {
  std::size_t parts = 2;
  while (!sequence.empty()) {
    parts = std::min(parts, sequence.size());
    bool smaller = false;
    // Last part first, which removes everything after the failure at once.
    for (std::size_t part = parts; part-- > 0 && !smaller;) {
      if (give_up()) {
        return sequence;
      }
      const std::size_t begin = sequence.size() * part / parts;
      const std::size_t end = sequence.size() * (part + 1) / parts;
      std::vector<Element> rest(sequence.begin(), sequence.begin() + static_cast<std::ptrdiff_t>(begin));
      rest.insert(rest.end(), sequence.begin() + static_cast<std::ptrdiff_t>(end), sequence.end());
      if (fails(rest)) {
        sequence.swap(rest);
        smaller = true;
      }
    }
    if (smaller) {
      parts = std::max<std::size_t>(parts - 1, 2);
    } else if (parts == sequence.size()) {
      break;
    } else {
      parts *= 2;
    }
  }
  return sequence;
}

} // namespace soak
