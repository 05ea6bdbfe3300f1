// The driver's virtual memory management: addresses that are reserved, memory without an address, and mappings. A range
// is accessible from cuMemSetAccess to cuMemUnmap only; any other access ends the program. The host's code may access
// all ranges here: the fake has no kernels, and copies run on the host.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <span>

#include "state.h"

using namespace fake_cuda;

namespace {

constexpr std::size_t kGranularity = std::size_t{2} << 20;

struct PieceState {
  int file = -1;
  std::size_t bytes = 0;
  int device = 0; ///< -1: the host's
  int mappings = 0;
  bool released = false;
};
struct RangeState {
  std::size_t bytes = 0;
  CUmemGenericAllocationHandle piece = 0; ///< 0: none
  void* begin = nullptr; ///< of the memory with the room to align it
  std::size_t whole = 0;
};

// Guarded by State::mutex.
std::map<CUmemGenericAllocationHandle, PieceState> pieces;
std::map<CUdeviceptr, RangeState> ranges;
CUmemGenericAllocationHandle next_piece = 1;

CUresult native(cudaError_t status) {
  switch (status) {
    case cudaSuccess:
      return CUDA_SUCCESS;
    case cudaErrorMemoryAllocation:
      return CUDA_ERROR_OUT_OF_MEMORY;
    case cudaErrorCudartUnloading:
      return CUDA_ERROR_DEINITIALIZED;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

/// A call's frame, as `call` of state.h for the driver: no error is remembered.
/// \param in_context whether the current device needs a context
template <typename Body>
CUresult driver_call(const char* name, bool in_context, Body body) {
  State& state = State::get();
  const std::lock_guard lock(state.mutex);
  const cudaError_t status = entered(state, name, Kind::kUnsafe);
  if (status != cudaSuccess) {
    return native(status);
  }
  if (in_context && !state.devices.at(static_cast<std::size_t>(current_device)).has_context) {
    state.complain(std::string(name) + " without a context");
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  return body(state);
}

bool is_place(const State& state, const CUmemLocation& place) {
  return place.type == CU_MEM_LOCATION_TYPE_HOST_NUMA
             ? state.has_host_pieces && place.id == kNode
             : place.type == CU_MEM_LOCATION_TYPE_DEVICE && state.valid(place.id);
}

int device_of(const CUmemLocation& place) {
  return place.type == CU_MEM_LOCATION_TYPE_HOST_NUMA ? -1 : place.id;
}

bool whole(std::size_t bytes) {
  return bytes != 0 && bytes % kGranularity == 0;
}

void drop_if_unused(State& state, CUmemGenericAllocationHandle handle) {
  const PieceState piece = pieces.at(handle);
  if (piece.released && piece.mappings == 0) {
    if (piece.device >= 0) {
      state.devices.at(static_cast<std::size_t>(piece.device)).used -= piece.bytes;
    }
    close(piece.file);
    pieces.erase(handle);
  }
}

CUresult wrong(State& state, const char* name, const char* what) {
  state.complain(std::string(name) + ": " + what);
  return CUDA_ERROR_INVALID_VALUE;
}

} // namespace

extern "C" {

CUresult cuMemGetAllocationGranularity(std::size_t* bytes, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* out, std::size_t bytes, std::size_t alignment, CUdeviceptr,
                             unsigned long long) {
  return driver_call("cuMemAddressReserve", true, [&](State&) {
    if (!whole(bytes)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const std::size_t align = alignment == 0 ? kGranularity : alignment;
    void* const begin = mmap(nullptr, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED) {
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = (reinterpret_cast<CUdeviceptr>(begin) + align - 1) / align * align;
    ranges[*out] = RangeState{bytes, 0, begin, bytes + align};
    return CUDA_SUCCESS;
  });
}

CUresult cuMemAddressFree(CUdeviceptr range, std::size_t bytes) {
  return driver_call("cuMemAddressFree", false, [&](State& state) {
    const auto found = ranges.find(range);
    if (found == ranges.end() || found->second.bytes != bytes || found->second.piece != 0) {
      return wrong(state, "cuMemAddressFree", "no such range, or one with memory");
    }
    munmap(found->second.begin, found->second.whole);
    ranges.erase(found);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* out, std::size_t bytes, const CUmemAllocationProp* properties,
                     unsigned long long) {
  return driver_call("cuMemCreate", true, [&](State& state) {
    const int device = device_of(properties->location);
    if (!whole(bytes) || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED || !is_place(state, properties->location)) {
      return wrong(state, "cuMemCreate", "a size or place that cannot be");
    }
    DeviceState* const owner = device >= 0 ? &state.devices[static_cast<std::size_t>(device)] : nullptr;
    if (owner != nullptr && bytes > state.memory - owner->used) {
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    const int file = memfd_create("fake_cuda", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) {
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (owner != nullptr) {
      owner->used += bytes;
    }
    *out = next_piece++;
    pieces[*out] = PieceState{file, bytes, device};
    return CUDA_SUCCESS;
  });
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return driver_call("cuMemRelease", true, [&](State& state) {
    const auto found = pieces.find(handle);
    if (found == pieces.end() || found->second.released) {
      return wrong(state, "cuMemRelease", "memory that is not there");
    }
    found->second.released = true;
    drop_if_unused(state, handle);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemMap(CUdeviceptr range, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
  return driver_call("cuMemMap", true, [&](State&) {
    const auto at = ranges.find(range);
    const auto piece = pieces.find(handle);
    if (at == ranges.end() || piece == pieces.end() || offset != 0 || piece->second.released ||
        bytes != piece->second.bytes || bytes != at->second.bytes || at->second.piece != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    at->second.piece = handle;
    ++piece->second.mappings;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemSetAccess(CUdeviceptr range, std::size_t bytes, const CUmemAccessDesc* access, std::size_t count) {
  return driver_call("cuMemSetAccess", true, [&](State& state) {
    const auto at = ranges.find(range);
    const std::span<const CUmemAccessDesc> all(access, count);
    const bool fits = std::ranges::all_of(all, [&](const CUmemAccessDesc& each) {
      return each.flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE && is_place(state, each.location);
    });
    if (at == ranges.end() || at->second.piece == 0 || at->second.bytes != bytes || count == 0 || !fits) {
      return wrong(state, "cuMemSetAccess", "a range without memory, or another kind of access");
    }
    const PieceState& piece = pieces.at(at->second.piece);
    const bool has_owner =
        std::ranges::any_of(all, [&](const CUmemAccessDesc& each) { return device_of(each.location) == piece.device; });
    if (piece.device >= 0 && !(has_owner && count == 1)) {
      return wrong(state, "cuMemSetAccess", "memory of a device that others are to access");
    }
    mmap(reinterpret_cast<void*>(range), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, piece.file, 0);
    Allocation allocation;
    allocation.made_by = "cuMemMap";
    allocation.bytes = bytes;
    allocation.device = piece.device;
    state.allocations.emplace(static_cast<std::uintptr_t>(range), std::move(allocation));
    return CUDA_SUCCESS;
  });
}

CUresult cuMemUnmap(CUdeviceptr range, std::size_t bytes) {
  return driver_call("cuMemUnmap", true, [&](State& state) {
    const auto at = ranges.find(range);
    if (at == ranges.end() || at->second.piece == 0 || at->second.bytes != bytes) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    mmap(reinterpret_cast<void*>(range), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
         0);
    const CUmemGenericAllocationHandle handle = at->second.piece;
    at->second.piece = 0;
    --pieces.at(handle).mappings;
    state.allocations.erase(static_cast<std::uintptr_t>(range));
    drop_if_unused(state, handle);
    return CUDA_SUCCESS;
  });
}

/// For tests: ranges and pieces that are not released.
std::size_t fake_cuda_live_ranges() {
  const std::lock_guard lock(State::get().mutex);
  return ranges.size() + pieces.size();
}

} // extern "C"
