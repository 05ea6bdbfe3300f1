#include "cuda/cuda_ranges.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "cuda/cuda_calls.h"
#include "cuda/cuda_versions.h"
#include "runtime/bytes.h"
#include "runtime/error.h"

namespace torch_uvm::cuda {
namespace {

constexpr unsigned int kSince = 10020; // the CUDA version of all signatures used here
constexpr std::size_t kAlignment = 2 * MiB; // of ranges, whatever the granularity
// Since CUDA 12.2: CU_MEM_LOCATION_TYPE_HOST_NUMA, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID,
// CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED. An older driver knows none of the attributes.
constexpr auto kHostNode = static_cast<CUmemLocationType>(3);
constexpr auto kNodeOfDevice = static_cast<CUdevice_attribute>(134);
constexpr auto kHostPieces = static_cast<CUdevice_attribute>(141);

template <typename Function>
void look_up(Function& function, const char* name) {
  void* found = nullptr;
  check(driver_function(name, kSince, &found), "cudaGetDriverEntryPoint");
  if (found == nullptr) {
    throw RuntimeFailure(std::string("the CUDA driver has no ") + name);
  }
  function = reinterpret_cast<Function>(found);
}

CUdeviceptr address_of(const void* range) {
  return reinterpret_cast<CUdeviceptr>(range);
}

CUmemGenericAllocationHandle handle_of(Piece piece) {
  return reinterpret_cast<CUmemGenericAllocationHandle>(piece.handle);
}

/// A scope for calls of the driver that need a context. The runtime makes one when a device is first used. For memory
/// of the host, any device's will do: the current one's.
class ContextScope {
 public:
  explicit ContextScope(int device) {
    if (device >= 0) {
      scope_.emplace(device);
    } else {
      cuda::check(cudaGetDevice(&device), "cudaGetDevice");
    }
    if (!has_context(device)) {
      cuda::check(cudaFree(nullptr), "cudaFree");
    }
  }

 private:
  std::optional<DeviceScope> scope_;
  CaptureScope uncaptured_;
};

} // namespace

AddressRanges* CudaRuntime::address_ranges() noexcept {
  std::call_once(ranges_looked_for_, [this] {
    try {
      ranges_ = std::make_unique<Ranges>(*this);
    } catch (...) {
      // The driver is older, or the process has forked or is ending.
    }
  });
  return ranges_.get();
}

CudaRuntime::Ranges::Ranges(const CudaRuntime& runtime) : runtime_(runtime) {
  look_up(driver_.get_error_string, "cuGetErrorString");
  look_up(driver_.device_get_attribute, "cuDeviceGetAttribute");
  look_up(driver_.get_granularity, "cuMemGetAllocationGranularity");
  look_up(driver_.address_reserve, "cuMemAddressReserve");
  look_up(driver_.address_free, "cuMemAddressFree");
  look_up(driver_.create, "cuMemCreate");
  look_up(driver_.release, "cuMemRelease");
  look_up(driver_.map, "cuMemMap");
  look_up(driver_.unmap, "cuMemUnmap");
  look_up(driver_.set_access, "cuMemSetAccess");
  bool has_host_pieces = true;
  for (int device = 0; device < runtime.device_count(); ++device) {
    const bool supported = attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device) != 0;
    granularities_.push_back(supported ? step_of(properties_of(device)) : 0);
    has_host_pieces = has_host_pieces && supported && attribute(kHostPieces, device) != 0;
  }
  host_node_ = std::max(attribute(kNodeOfDevice, 0), 0); // -1: the machine has one node
  host_granularity_ = has_host_pieces ? step_of(properties_of(-1)) : 0;
}

int CudaRuntime::Ranges::attribute(CUdevice_attribute which, int device) const noexcept {
  int value = 0;
  return driver_.device_get_attribute(&value, which, device) == CUDA_SUCCESS ? value : 0;
}

CUmemAllocationProp CudaRuntime::Ranges::properties_of(int device) const {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = device >= 0 ? CU_MEM_LOCATION_TYPE_DEVICE : kHostNode;
  properties.location.id = device >= 0 ? device : host_node_;
  return properties;
}

std::size_t CudaRuntime::Ranges::step_of(const CUmemAllocationProp& properties) const {
  std::size_t granularity = 0;
  check(driver_.get_granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
        "cuMemGetAllocationGranularity");
  return granularity;
}

void CudaRuntime::Ranges::check(CUresult status, const char* call) const {
  if (status != CUDA_SUCCESS) {
    const char* text = nullptr;
    driver_.get_error_string(status, &text);
    throw RuntimeFailure(std::string(call) + " failed: " + (text == nullptr ? "unknown error" : text));
  }
}

void CudaRuntime::Ranges::refuse(CUresult status, const char* call, std::size_t bytes, OutOfMemory::Cause cause) const {
  if (status != CUDA_ERROR_OUT_OF_MEMORY) {
    check(status, call);
  }
  throw OutOfMemory(cause, bytes, std::string(call) + " of " + format_bytes(bytes) + " failed: out of memory");
}

std::size_t CudaRuntime::Ranges::granularity(int device) const {
  if (device == Location::host().index) {
    return host_granularity_;
  }
  runtime_.check_device(device);
  return granularities_[static_cast<std::size_t>(device)];
}

void CudaRuntime::Ranges::check_size(const char* what, std::size_t bytes, int device) const {
  const std::size_t step = granularity(device);
  if (step == 0) {
    throw RuntimeFailure(to_string(Location{device}) + " has no virtual memory management");
  }
  if (bytes == 0 || bytes % step != 0) {
    throw InvalidArgument(std::string(what) + " of " + std::to_string(bytes) +
                          " bytes; accepted: positive multiples of " + std::to_string(step));
  }
}

void* CudaRuntime::Ranges::reserve(std::size_t bytes, int device) {
  check_size("an address range", bytes, device);
  const ContextScope scope(device);
  CUdeviceptr range = 0;
  const CUresult status = driver_.address_reserve(&range, bytes, kAlignment, /*addr=*/0, /*flags=*/0);
  if (status != CUDA_SUCCESS) {
    refuse(status, "cuMemAddressReserve", bytes, OutOfMemory::Cause::kRuntime);
  }
  return reinterpret_cast<void*>(range);
}

void CudaRuntime::Ranges::release(void* range, std::size_t bytes) noexcept {
  if (!is_forked_child()) {
    const CaptureScope uncaptured;
    driver_.address_free(address_of(range), bytes);
  }
}

Piece CudaRuntime::Ranges::allocate_piece(std::size_t bytes, int device) {
  check_size("a piece", bytes, device);
  const bool of_host = device == Location::host().index;
  if (of_host && bytes > runtime_.host_memory_available()) { // the driver may pin more than the host can spare
    throw OutOfMemory(OutOfMemory::Cause::kHost, bytes,
                      "pinned host memory of " + format_bytes(bytes) +
                          " failed: " + format_bytes(runtime_.host_memory_available()) + " available there");
  }
  const ContextScope scope(device);
  const CUmemAllocationProp properties = properties_of(device);
  CUmemGenericAllocationHandle handle = 0;
  const CUresult status = driver_.create(&handle, bytes, &properties, /*flags=*/0);
  if (status != CUDA_SUCCESS) {
    refuse(status, "cuMemCreate", bytes, of_host ? OutOfMemory::Cause::kHost : OutOfMemory::Cause::kDevice);
  }
  return Piece{reinterpret_cast<void*>(handle), bytes, device};
}

void CudaRuntime::Ranges::free_piece(Piece piece) noexcept {
  if (!piece || is_forked_child()) {
    return;
  }
  try {
    const ContextScope scope(piece.device);
    driver_.release(handle_of(piece));
  } catch (const RuntimeFailure&) {
    // At process exit the driver may be unloaded, and the memory with it.
  }
}

void CudaRuntime::Ranges::map(void* range, Piece piece, int device) {
  check_size("a piece", piece.bytes, piece.device);
  if (piece.device >= 0 && piece.device != device) {
    throw InvalidArgument("a piece of " + to_string(Location{piece.device}) + " for an address range of " +
                          to_string(Location{device}));
  }
  const ContextScope scope(device);
  const CUresult mapped = driver_.map(address_of(range), piece.bytes, /*offset=*/0, handle_of(piece), /*flags=*/0);
  if (mapped == CUDA_ERROR_INVALID_VALUE) {
    throw InvalidArgument(
        "cuMemMap: a piece or an address range that does not exist or is in use; accepted: a piece "
        "and a range of the same size and device that holds none");
  }
  check(mapped, "cuMemMap");
  std::vector<CUmemAccessDesc> access;
  const auto may_access = [&](int who) {
    access.push_back({properties_of(who).location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
  };
  may_access(device);
  for (int other = 0; device < 0 && other < runtime_.device_count(); ++other) {
    may_access(other);
  }
  const CUresult granted = driver_.set_access(address_of(range), piece.bytes, access.data(), access.size());
  if (granted != CUDA_SUCCESS) {
    driver_.unmap(address_of(range), piece.bytes);
    check(granted, "cuMemSetAccess");
  }
}

void CudaRuntime::Ranges::unmap(void* range, Piece piece) {
  check_size("a piece", piece.bytes, piece.device);
  const ContextScope scope(piece.device);
  const CUresult status = driver_.unmap(address_of(range), piece.bytes);
  if (status == CUDA_ERROR_INVALID_VALUE) {
    throw InvalidArgument("cuMemUnmap: that address range holds no such piece");
  }
  check(status, "cuMemUnmap");
}

} // namespace torch_uvm::cuda
