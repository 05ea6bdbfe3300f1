// Address ranges on CUDA: the driver's virtual memory management. The host's pieces are on the NUMA node next to device
// 0. The driver's functions are looked up at run time, because the extension does not link to the driver.
#pragma once

#include <cuda.h>

#include <vector>

#include "cuda/cuda_runtime.h"

namespace torch_uvm::cuda {

/// Holds no state that changes, so it needs no lock: a Piece has all that the driver asks for.
class CudaRuntime::Ranges final : public AddressRanges {
 public:
  /// \throws RuntimeFailure if the driver has no such functions
  explicit Ranges(const CudaRuntime& runtime);

  std::size_t granularity(int device) const override;
  void* reserve(std::size_t bytes, int device) override;
  void release(void* range, std::size_t bytes) noexcept override;
  Piece allocate_piece(std::size_t bytes, int device) override;
  void free_piece(Piece piece) noexcept override;
  void map(void* range, Piece piece, int device) override;
  void unmap(void* range, Piece piece) override;

 private:
  /// The driver's functions, with the signatures of CUDA 10.2, which has all of them.
  struct Driver {
    decltype(&cuGetErrorString) get_error_string;
    decltype(&cuDeviceGetAttribute) device_get_attribute;
    decltype(&cuMemGetAllocationGranularity) get_granularity;
    decltype(&cuMemAddressReserve) address_reserve;
    decltype(&cuMemAddressFree) address_free;
    decltype(&cuMemCreate) create;
    decltype(&cuMemRelease) release;
    decltype(&cuMemMap) map;
    decltype(&cuMemUnmap) unmap;
    decltype(&cuMemSetAccess) set_access;
  };
  void check(CUresult status, const char* call) const;
  [[noreturn]] void refuse(CUresult status, const char* call, std::size_t bytes, OutOfMemory::Cause cause) const;
  void check_size(const char* what, std::size_t bytes, int device) const;
  /// An attribute of the device, or 0 if the driver does not know it.
  int attribute(CUdevice_attribute which, int device) const noexcept;
  CUmemAllocationProp properties_of(int device) const;
  /// Granularity of a kind of memory. \throws RuntimeFailure
  std::size_t step_of(const CUmemAllocationProp& properties) const;

  const CudaRuntime& runtime_;
  Driver driver_{};
  std::vector<std::size_t> granularities_; ///< by device; 0: it has no such memory
  std::size_t host_granularity_ = 0;
  int host_node_ = 0;
};

} // namespace torch_uvm::cuda
