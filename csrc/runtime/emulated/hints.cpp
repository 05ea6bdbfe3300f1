// Advice, discards, and queries of a range.
#include "runtime/emulated/pages.h"

namespace torch_uvm::emulated {
namespace {

std::optional<Location> location_of(std::int8_t index) {
  return index == Page::kNone ? std::nullopt : std::optional(Location{index});
}

bool same_accessors(const Page& left, const Page& right) {
  return left.accessed_by == right.accessed_by && left.accessed_by_host == right.accessed_by_host;
}

} // namespace

void PageTable::advise(ManagedAllocation& allocation, const void* ptr, std::size_t bytes, Advice advice,
                       Location location) {
  const Span span = span_of(allocation, ptr, bytes);
  for (std::size_t index = span.first; index <= span.last; ++index) {
    Page& page = allocation.pages[index];
    switch (advice) {
      case Advice::kSetReadMostly:
        page.read_mostly = true;
        break;
      case Advice::kUnsetReadMostly:
        page.read_mostly = false;
        if (page.copies() > 1) {
          keep_only(allocation, index, page.main_copy());
        }
        break;
      case Advice::kSetPreferredLocation:
        page.preferred = static_cast<std::int8_t>(location.index);
        break;
      case Advice::kUnsetPreferredLocation:
        page.preferred = Page::kNone;
        break;
      case Advice::kSetAccessedBy:
      case Advice::kUnsetAccessedBy: {
        const bool set = advice == Advice::kSetAccessedBy;
        if (location.is_host()) {
          page.accessed_by_host = set;
        } else if (set) {
          page.accessed_by |= bit(location.index);
        } else {
          page.accessed_by &= ~bit(location.index);
        }
        break;
      }
    }
  }
}

void PageTable::discard(ManagedAllocation& allocation, const void* ptr, std::size_t bytes) {
  const Span span = span_of(allocation, ptr, bytes);
  for (std::size_t index = span.first; index <= span.last; ++index) {
    const std::size_t in_allocation = std::min(allocation.bytes, (index + 1) * kPageBytes) - index * kPageBytes;
    Page& page = allocation.pages[index];
    if (span.bytes_in(index) == in_allocation && !page.untouched()) {
      page.discarded = true;
    }
  }
}

RangeAttributes PageTable::attributes(const ManagedAllocation& allocation, const void* ptr, std::size_t bytes) const {
  const Span span = span_of(allocation, ptr, bytes);
  const Page& first = allocation.pages[span.first];
  bool same_read_mostly = true, same_preferred = true, same_mapped = true, same_prefetch = true;
  for (std::size_t index = span.first + 1; index <= span.last; ++index) {
    const Page& page = allocation.pages[index];
    same_read_mostly = same_read_mostly && page.read_mostly == first.read_mostly;
    same_preferred = same_preferred && page.preferred == first.preferred;
    same_mapped = same_mapped && same_accessors(page, first);
    same_prefetch = same_prefetch && page.last_prefetch == first.last_prefetch;
  }
  RangeAttributes attributes;
  attributes.uniform = same_read_mostly && same_preferred && same_mapped && same_prefetch;
  attributes.read_mostly = same_read_mostly && first.read_mostly;
  if (same_preferred) {
    attributes.preferred_location = location_of(first.preferred);
  }
  if (same_prefetch) {
    attributes.last_prefetch = location_of(first.last_prefetch);
  }
  if (same_mapped) {
    if (first.accessed_by_host) {
      attributes.accessed_by.push_back(Location::host());
    }
    for (std::uint64_t left = first.accessed_by; left != 0; left &= left - 1) {
      attributes.accessed_by.push_back(Location::device(std::countr_zero(left)));
    }
  }
  return attributes;
}

ResidencyInfo PageTable::residency(const ManagedAllocation& allocation, const void* ptr, std::size_t bytes) const {
  const Span span = span_of(allocation, ptr, bytes);
  ResidencyInfo info;
  info.devices.resize(devices_.size());
  for (std::size_t index = span.first; index <= span.last; ++index) {
    const Page& page = allocation.pages[index];
    const std::size_t in_range = span.bytes_in(index);
    if (page.untouched()) {
      info.untouched += in_range;
    }
    if (page.host) {
      info.host += in_range;
    }
    for (std::uint64_t left = page.devices; left != 0; left &= left - 1) {
      info.devices[static_cast<std::size_t>(std::countr_zero(left))] += in_range;
    }
  }
  return info;
}

} // namespace torch_uvm::emulated
