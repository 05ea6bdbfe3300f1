#include "recording/recording_hints.h"

#include <set>

namespace torch_uvm::recording {
namespace {

RangeAttributes attributes_at(const std::vector<Hint>& hints, std::uintptr_t address) {
  RangeAttributes attributes;
  std::set<Location> accessed_by;
  for (const Hint& hint : hints) {
    if (address < hint.begin || address >= hint.end) {
      continue;
    }
    if (!hint.advice) {
      attributes.last_prefetch = hint.location;
      continue;
    }
    switch (*hint.advice) {
      case Advice::kSetReadMostly:
        attributes.read_mostly = true;
        break;
      case Advice::kUnsetReadMostly:
        attributes.read_mostly = false;
        break;
      case Advice::kSetPreferredLocation:
        attributes.preferred_location = hint.location;
        break;
      case Advice::kUnsetPreferredLocation:
        attributes.preferred_location.reset();
        break;
      case Advice::kSetAccessedBy:
        accessed_by.insert(hint.location);
        break;
      case Advice::kUnsetAccessedBy:
        accessed_by.erase(hint.location);
        break;
    }
  }
  attributes.accessed_by.assign(accessed_by.begin(), accessed_by.end());
  return attributes;
}

} // namespace

RangeAttributes attributes_of(const std::vector<Hint>& hints, std::uintptr_t begin, std::uintptr_t end) {
  std::set<std::uintptr_t> changes; // addresses at which attributes may change
  for (const Hint& hint : hints) {
    changes.insert({hint.begin, hint.end});
  }
  RangeAttributes result = attributes_at(hints, begin);
  const RangeAttributes first = result;
  for (auto at = changes.upper_bound(begin); at != changes.end() && *at < end; ++at) {
    const RangeAttributes other = attributes_at(hints, *at);
    if (other.read_mostly != first.read_mostly) {
      result.read_mostly = false;
      result.uniform = false;
    }
    if (other.preferred_location != first.preferred_location) {
      result.preferred_location.reset();
      result.uniform = false;
    }
    if (other.accessed_by != first.accessed_by) {
      result.accessed_by.clear();
      result.uniform = false;
    }
    if (other.last_prefetch != first.last_prefetch) {
      result.last_prefetch.reset();
      result.uniform = false;
    }
  }
  return result;
}

} // namespace torch_uvm::recording
