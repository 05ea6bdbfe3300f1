// The effects of accesses, prefetches and copies on each page.
#include <algorithm>

#include "runtime/emulated/pages.h"

namespace torch_uvm::emulated {

void PageTable::touch(Location who, const void* ptr, std::size_t bytes, bool write, Traffic& traffic) {
  if (bytes == 0) {
    return;
  }
  ManagedAllocation* allocation = find(ptr);
  if (allocation == nullptr) {
    traffic.local += bytes;
    return;
  }
  const std::size_t inside =
      std::min(bytes, allocation->bytes - (reinterpret_cast<std::uintptr_t>(ptr) - allocation->base));
  traffic.local += bytes - inside;
  const Span span = span_of(*allocation, ptr, inside);
  if (who.is_host()) {
    touch_from_host(*allocation, span, write, traffic);
  } else {
    touch_from_device(*allocation, span, who.index, write, traffic);
  }
}

void PageTable::touch_from_device(ManagedAllocation& allocation, const Span& span, int device, bool write,
                                  Traffic& traffic) {
  const std::uint64_t own = bit(device);
  for (std::size_t index = span.first; index <= span.last; ++index) {
    Page& page = allocation.pages[index];
    if ((page.devices & own) != 0) [[likely]] {
      used_now(allocation, index, device);
      traffic.local += span.bytes_in(index);
      if (write) {
        if (page.devices != own || page.host) {
          keep_only(allocation, index, Location::device(device));
        }
        page.discarded = false;
      }
      continue;
    }
    miss_on_device(allocation, index, span.bytes_in(index), device, write, traffic);
    if (write) {
      page.discarded = false;
    }
  }
}

void PageTable::miss_on_device(ManagedAllocation& allocation, std::size_t index, std::size_t bytes, int device,
                               bool write, Traffic& traffic) {
  Page& page = allocation.pages[index];
  EmulatedCounters& counters = counters_.of(device);
  if (page.untouched()) {
    populate(allocation, index, device, true, bytes, write, traffic);
    return;
  }
  if (memory_ == MemoryKind::kOne) {
    traffic.local += bytes;
    return;
  }
  if (memory_ == MemoryKind::kCoherent) {
    if (!page.host) {
      used_now(allocation, index, std::countr_zero(page.devices));
    }
    use_in_place(page, bytes, device, write, false, traffic);
    return;
  }
  if (page.read_mostly && !write) {
    if (make_room(device, traffic)) {
      ++counters.faults_on_device;
      bring_to_device(allocation, index, device, true, traffic);
      traffic.local += bytes;
    } else {
      use_in_place(page, bytes, device, write, true, traffic);
    }
    return;
  }
  const bool mapped = (page.accessed_by & bit(device)) != 0;
  const bool preferred_elsewhere = page.preferred != Page::kNone && page.preferred != device;
  const bool at_preferred =
      preferred_elsewhere && (page.preferred < 0 ? page.host : (page.devices & bit(page.preferred)) != 0);
  if (at_preferred) {
    if (write && page.copies() > 1) {
      keep_only(allocation, index, Location{page.preferred});
    }
    if (page.preferred >= 0) {
      used_now(allocation, index, page.preferred);
    }
    use_in_place(page, bytes, device, write, !mapped, traffic);
    return;
  }
  if (mapped && page.preferred == Page::kNone && page.host) {
    if (write) {
      keep_only(allocation, index, Location::host());
    }
    use_in_place(page, bytes, device, write, false, traffic);
    return;
  }
  if (!make_room(device, traffic)) {
    if (write && page.copies() > 1) {
      keep_only(allocation, index, page.main_copy());
    }
    use_in_place(page, bytes, device, write, true, traffic);
    return;
  }
  ++counters.faults_on_device;
  bring_to_device(allocation, index, device, false, traffic);
  traffic.local += bytes;
}

void PageTable::touch_from_host(ManagedAllocation& allocation, const Span& span, bool write, Traffic& traffic) {
  for (std::size_t index = span.first; index <= span.last; ++index) {
    Page& page = allocation.pages[index];
    if (page.host) {
      if (write && page.devices != 0) {
        keep_only(allocation, index, Location::host());
      }
    } else if (page.untouched()) {
      // The host cannot map device memory, so it ignores a preferred location on a device.
      page.host = true;
      ++counters_.of(Location::host()).faults_on_host;
      traffic.populated += kPageBytes;
    } else if (memory_ == MemoryKind::kCoherent) {
      use_in_place(page, span.bytes_in(index), std::countr_zero(page.devices), write, false, traffic);
      continue;
    } else {
      ++counters_.of(std::countr_zero(page.devices)).faults_on_host;
      bring_to_host(allocation, index, page.read_mostly && !write, traffic);
    }
    traffic.local += span.bytes_in(index);
    if (write) {
      page.discarded = false;
    }
  }
}

void PageTable::populate(ManagedAllocation& allocation, std::size_t index, int device, bool by_fault, std::size_t bytes,
                         bool write, Traffic& traffic) {
  Page& page = allocation.pages[index];
  EmulatedCounters& counters = counters_.of(device);
  counters.faults_on_device += by_fault ? 1 : 0;
  page.discarded = false;
  // A kernel's first touch populates the preferred location. A prefetch names its target and ignores the preference.
  const bool elsewhere = by_fault && page.preferred != Page::kNone && page.preferred != device;
  const Location target = elsewhere ? Location{page.preferred} : Location::device(device);
  if (!target.is_host() && make_room(target.index, traffic)) {
    place(allocation, index, target.index);
  } else {
    page.host = true;
  }
  traffic.populated += kPageBytes;
  if ((page.devices & bit(device)) != 0 || memory_ == MemoryKind::kOne) {
    traffic.local += by_fault ? bytes : 0;
    return;
  }
  if (by_fault) {
    use_in_place(page, bytes, device, write, false, traffic); // the fault is already counted, and it created a mapping
  }
}

void PageTable::use_in_place(const Page& page, std::size_t bytes, int device, bool write, bool fault,
                             Traffic& traffic) {
  EmulatedCounters& counters = counters_.of(device);
  counters.bytes_in_place += bytes;
  if (fault) {
    ++counters.faults_on_device;
    traffic.in_place_faulted += bytes;
  } else {
    (write ? traffic.in_place_written : traffic.in_place_read) += bytes;
  }
  traffic.sources |= page.devices;
}

void PageTable::bring_to_device(ManagedAllocation& allocation, std::size_t index, int device, bool duplicate,
                                Traffic& traffic) {
  Page& page = allocation.pages[index];
  const std::size_t bytes = page.discarded ? 0 : kPageBytes;
  traffic.moved += bytes;
  traffic.sources |= page.devices;
  counters_.of(device).bytes_to_device += bytes;
  const bool several = page.copies() > 1;
  const std::uint64_t before = page.devices;
  place(allocation, index, device);
  page.discarded = false;
  if (duplicate) {
    return;
  }
  if (several) {
    keep_only(allocation, index, Location::device(device)); // counts the dropped duplicates
    return;
  }
  if (before != 0) {
    displace(allocation, index, std::countr_zero(before));
  }
  page.host = false;
}

void PageTable::bring_to_host(ManagedAllocation& allocation, std::size_t index, bool duplicate, Traffic& traffic) {
  Page& page = allocation.pages[index];
  const std::size_t bytes = page.discarded ? 0 : kPageBytes;
  const int from = std::countr_zero(page.devices);
  traffic.moved += bytes;
  traffic.sources |= bit(from);
  counters_.of(from).bytes_to_host += bytes;
  page.discarded = false;
  page.host = true;
  if (duplicate) {
    return;
  }
  displace(allocation, index, from); // this copy moved; the remaining ones are dropped as duplicates
  keep_only(allocation, index, Location::host());
}

void PageTable::prefetch(ManagedAllocation& allocation, const void* ptr, std::size_t bytes, Location to,
                         Traffic& traffic) {
  const Span span = span_of(allocation, ptr, bytes);
  for (std::size_t index = span.first; index <= span.last; ++index) {
    Page& page = allocation.pages[index];
    page.last_prefetch = static_cast<std::int8_t>(to.index);
    if (to.is_host()) {
      if (page.host) {
        if (!page.read_mostly) {
          keep_only(allocation, index, to);
        }
      } else if (page.untouched()) {
        page.host = true;
        page.discarded = false;
        traffic.populated += kPageBytes;
      } else {
        bring_to_host(allocation, index, page.read_mostly, traffic);
      }
      continue;
    }
    if ((page.devices & bit(to.index)) != 0) {
      used_now(allocation, index, to.index);
    } else if (page.untouched()) {
      populate(allocation, index, to.index, false, 0, false, traffic);
    } else if (make_room(to.index, traffic)) {
      bring_to_device(allocation, index, to.index, page.read_mostly, traffic);
    } // else plain memory fills the whole device: the page stays where it is
  }
}

CopySide PageTable::copy_side(ManagedAllocation& allocation, const void* ptr, std::size_t bytes, int device, bool write,
                              Traffic& traffic) {
  const Span span = span_of(allocation, ptr, bytes);
  CopySide side;
  for (std::size_t index = span.first; index <= span.last; ++index) {
    Page& page = allocation.pages[index];
    if (page.untouched() && page.preferred == Location::host().index) {
      page.host = true;
      traffic.populated += kPageBytes;
    } else if (page.untouched()) {
      populate(allocation, index, page.preferred == Page::kNone ? device : page.preferred, false, 0, write, traffic);
    }
    int place = -1;
    if (page.devices != 0) {
      place = (page.devices & bit(device)) != 0 ? device : std::countr_zero(page.devices);
      used_now(allocation, index, place);
      side.device += span.bytes_in(index);
      side.device_index = place;
    } else {
      side.host += span.bytes_in(index);
    }
    if (write) {
      if (page.copies() > 1) {
        keep_only(allocation, index, Location{place});
      }
      page.discarded = false;
    }
  }
  return side;
}

} // namespace torch_uvm::emulated
