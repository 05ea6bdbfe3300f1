// Delta debugging (Zeller and Hildebrandt, 2002): the shortest part of a failing sequence that still fails.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

namespace soak {

/// \param fails whether a sequence fails; it has to for the whole one
/// \param give_up asked before each try: true ends the search with what has been found by then
/// \return a part of it, in its order, that fails; unless given up, one of which no single element can be left out
template <typename Element>
std::vector<Element> minimise(
    std::vector<Element> sequence, const std::function<bool(const std::vector<Element>&)>& fails,
    const std::function<bool()>& give_up = [] { return false; }) {
  std::size_t parts = 2;
  while (!sequence.empty()) {
    parts = std::min(parts, sequence.size());
    bool smaller = false;
    // The last first: what comes after the failure goes at once.
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
