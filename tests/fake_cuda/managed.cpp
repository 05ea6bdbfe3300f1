// Hints about managed memory, page by page, as they were given.
#include <algorithm>
#include <array>

#include "state.h"

using namespace fake_cuda;

namespace {

constexpr int kHostBit = 63;

int id_of(cudaMemLocation location) {
  return location.type == cudaMemLocationTypeHost ? cudaCpuDeviceId : location.id;
}

bool known(State& state, cudaMemLocation location) {
  return location.type == cudaMemLocationTypeHost ||
         (location.type == cudaMemLocationTypeDevice && state.valid(location.id));
}

/// The pages of a range of managed memory; null if it is none.
struct Pages {
  Hints* begin = nullptr;
  Hints* end = nullptr;
};

Pages pages_of(State& state, const char* name, const void* ptr, std::size_t bytes) {
  auto* const found = state.find(ptr);
  if (found == nullptr || !found->second.managed || bytes == 0 || !state.holds(ptr, bytes)) {
    state.complain(std::string(name) + " of what is no range of managed memory");
    return {};
  }
  Allocation& allocation = found->second;
  if (allocation.hints.empty()) {
    allocation.hints.resize((allocation.bytes + kPage - 1) / kPage);
  }
  const std::size_t offset = reinterpret_cast<std::uintptr_t>(ptr) - found->first;
  return {allocation.hints.data() + offset / kPage, allocation.hints.data() + (offset + bytes + kPage - 1) / kPage};
}

cudaError_t no_hints(State& state, const char* name) {
  state.complain(std::string(name) + " where host and device cannot touch memory at once");
  return cudaErrorInvalidDevice;
}

/// One attribute of a range: what all its pages have, or cudaInvalidDeviceId, or 0.
cudaError_t answer(State& state, const Pages& pages, cudaMemRangeAttribute which, int* data, std::size_t bytes) {
  const auto same = [&](int Hints::* field) {
    const int first = pages.begin->*field;
    return std::all_of(pages.begin, pages.end, [&](const Hints& page) { return page.*field == first; }) ? first
                                                                                                        : kNowhere;
  };
  switch (which) {
    case cudaMemRangeAttributeReadMostly:
      *data = std::all_of(pages.begin, pages.end, [](const Hints& page) { return page.read_mostly; }) ? 1 : 0;
      return cudaSuccess;
    case cudaMemRangeAttributePreferredLocation:
      *data = same(&Hints::preferred);
      return cudaSuccess;
    case cudaMemRangeAttributeLastPrefetchLocation:
      *data = same(&Hints::last_prefetch);
      return cudaSuccess;
    case cudaMemRangeAttributeAccessedBy: {
      std::uint64_t all = ~std::uint64_t{0};
      for (const Hints* page = pages.begin; page != pages.end; ++page) {
        all &= page->accessed_by;
      }
      std::size_t index = 0;
      for (int device = -1; device < static_cast<int>(state.devices.size()); ++device) {
        if ((all >> (device < 0 ? kHostBit : device) & 1) != 0 && index < bytes / sizeof(int)) {
          data[index++] = device;
        }
      }
      std::fill(data + index, data + bytes / sizeof(int), kNowhere);
      return cudaSuccess;
    }
    default:
      return cudaErrorInvalidValue;
  }
}

} // namespace

extern "C" {

cudaError_t cudaMemPrefetchAsync(const void* ptr, std::size_t bytes, cudaMemLocation location, unsigned int,
                                 cudaStream_t stream) {
  return call("cudaMemPrefetchAsync", Kind::kPlain, [&](State& state) -> cudaError_t {
    if (!state.concurrent) {
      return no_hints(state, "cudaMemPrefetchAsync");
    }
    const Pages pages = pages_of(state, "cudaMemPrefetchAsync", ptr, bytes);
    if (pages.begin == nullptr || !known(state, location)) {
      return cudaErrorInvalidValue;
    }
    const cudaError_t status = state.queue("cudaMemPrefetchAsync", stream, false);
    if (status == cudaSuccess) {
      std::for_each(pages.begin, pages.end, [&](Hints& page) { page.last_prefetch = id_of(location); });
    }
    return status;
  });
}

cudaError_t cudaMemAdvise(const void* ptr, std::size_t bytes, cudaMemoryAdvise advice, cudaMemLocation location) {
  return call("cudaMemAdvise", Kind::kPlain, [&](State& state) -> cudaError_t {
    if (!state.concurrent) {
      return no_hints(state, "cudaMemAdvise");
    }
    const Pages pages = pages_of(state, "cudaMemAdvise", ptr, bytes);
    const bool ignored = advice == cudaMemAdviseSetReadMostly || advice == cudaMemAdviseUnsetReadMostly ||
                         advice == cudaMemAdviseUnsetPreferredLocation;
    if (pages.begin == nullptr || (!ignored && !known(state, location))) {
      return cudaErrorInvalidValue;
    }
    if (advice == cudaMemAdviseUnsetReadMostly && !pages.begin->read_mostly) {
      return cudaSuccess; // and does nothing, as a driver did whatever the other pages had
    }
    const std::uint64_t bit = std::uint64_t{1} << (id_of(location) < 0 ? kHostBit : id_of(location));
    for (Hints* page = pages.begin; page != pages.end; ++page) {
      switch (advice) {
        case cudaMemAdviseSetReadMostly:
        case cudaMemAdviseUnsetReadMostly:
          page->read_mostly = advice == cudaMemAdviseSetReadMostly;
          break;
        case cudaMemAdviseSetPreferredLocation:
          page->preferred = id_of(location);
          break;
        case cudaMemAdviseUnsetPreferredLocation:
          page->preferred = kNowhere;
          break;
        case cudaMemAdviseSetAccessedBy:
          page->accessed_by |= bit;
          break;
        case cudaMemAdviseUnsetAccessedBy:
          page->accessed_by &= ~bit;
          break;
        default:
          return cudaErrorInvalidValue;
      }
    }
    return cudaSuccess;
  });
}

cudaError_t cudaMemDiscardBatchAsync(void** ptrs, std::size_t* sizes, std::size_t count, unsigned long long,
                                     cudaStream_t stream) {
  return call("cudaMemDiscardBatchAsync", Kind::kPlain, [&](State& state) -> cudaError_t {
    if (stream == nullptr) {
      return cudaErrorInvalidValue; // the legacy default stream is not taken
    }
    for (std::size_t index = 0; index < count; ++index) {
      if (pages_of(state, "cudaMemDiscardBatchAsync", ptrs[index], sizes[index]).begin == nullptr) {
        return cudaErrorInvalidValue;
      }
    }
    return state.queue("cudaMemDiscardBatchAsync", stream, false);
  });
}

cudaError_t cudaMemDiscardAndPrefetchBatchAsync(void** ptrs, std::size_t* sizes, std::size_t count,
                                                cudaMemLocation* locations, std::size_t* firsts,
                                                std::size_t location_count, unsigned long long, cudaStream_t stream) {
  return call("cudaMemDiscardAndPrefetchBatchAsync", Kind::kPlain, [&](State& state) -> cudaError_t {
    if (!state.concurrent) {
      return no_hints(state, "cudaMemDiscardAndPrefetchBatchAsync");
    }
    if (stream == nullptr || location_count == 0 || location_count > count || firsts[0] != 0) {
      return cudaErrorInvalidValue; // the legacy default stream is not taken
    }
    const cudaError_t status = state.queue("cudaMemDiscardAndPrefetchBatchAsync", stream, false);
    for (std::size_t index = 0, place = 0; index < count && status == cudaSuccess; ++index) {
      const Pages pages = pages_of(state, "cudaMemDiscardAndPrefetchBatchAsync", ptrs[index], sizes[index]);
      place += place + 1 < location_count && firsts[place + 1] == index ? 1 : 0;
      if (pages.begin == nullptr || !known(state, locations[place])) {
        return cudaErrorInvalidValue;
      }
      std::for_each(pages.begin, pages.end, [&](Hints& page) { page.last_prefetch = id_of(locations[place]); });
    }
    return status;
  });
}

cudaError_t cudaMemRangeGetAttributes(void** data, std::size_t* sizes, cudaMemRangeAttribute* which, std::size_t count,
                                      const void* ptr, std::size_t bytes) {
  return call("cudaMemRangeGetAttributes", Kind::kPlain, [&](State& state) -> cudaError_t {
    const Pages pages = pages_of(state, "cudaMemRangeGetAttributes", ptr, bytes);
    if (pages.begin == nullptr) {
      return cudaErrorInvalidValue;
    }
    for (std::size_t index = 0; index < count; ++index) {
      const cudaError_t status = answer(state, pages, which[index], static_cast<int*>(data[index]), sizes[index]);
      if (status != cudaSuccess) {
        return status;
      }
    }
    return cudaSuccess;
  });
}

} // extern "C"
