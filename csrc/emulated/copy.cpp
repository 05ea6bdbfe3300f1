// Copies on a device, between devices, and between the host and a device.
#include <ATen/Functions.h>
#include <ATen/ops/_local_scalar_dense_native.h>

#include <array>

#include "emulated/backend.h"
#include "emulated/kernels.h"
#include "emulated/memory.h"
#include "emulated/operands.h"
#include "tensor/dispatch/kernels.h"
#include "tensor/process/streams.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm::emulated {
namespace {

/// Whether a copy between the tensors is a plain copy of their bytes.
bool same_bytes_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.dtype() == b.dtype() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

void* data_of(const at::Tensor& tensor, bool write) {
  char* base = static_cast<char*>(write ? tensor.storage().mutable_data() : const_cast<void*>(tensor.storage().data()));
  return base + static_cast<std::size_t>(tensor.storage_offset()) * tensor.itemsize();
}

/// On one device: the CPU's copy_, run as a kernel.
void copy_within(const at::Tensor& self, const at::Tensor& dst) {
  const int device = dst.device().index();
  Operands operands(device);
  at::Tensor to = operands.to_cpu(dst, true);
  const at::Tensor from = operands.to_cpu(self, false);
  const std::array<Touch, 2> accesses{access_of(self, false), access_of(dst, true)};
  runtime().begin_kernel(current_stream(device), accesses);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const AllocationScope on_device(device);
  to.copy_(from);
}

/// Between the host and a device, for tensors of the same layout. Waits for the copy, unless it is non_blocking and the
/// host side is pinned or managed: nothing orders accesses to other host memory after the copy.
void copy_across(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  const at::Tensor& device_side = is_ours(self) ? self : dst;
  const at::Tensor& host_side = is_ours(self) ? dst : self;
  const Stream stream = current_stream(device_side.device().index());
  Kernel kernel;
  kernel.use(device_side.storage().unsafeGetStorageImpl(), is_ours(dst));
  record_stream(host_side.storage().data_ptr(), stream); // first: if it throws, no copy is pending
  runtime().copy_async(data_of(dst, true), data_of(self, false), self.nbytes(), stream);
  const bool host_side_waits =
      is_managed(host_side.storage().data_ptr()) || runtime().is_pinned_ptr(data_of(host_side, false));
  if (!(non_blocking && host_side_waits)) {
    runtime().synchronize_stream(stream);
  }
}

/// Between two devices, ordered with the current streams of both.
void copy_between(const at::Tensor& self, const at::Tensor& dst) {
  const Stream from = current_stream(self.device().index());
  const Stream to = current_stream(dst.device().index());
  Kernel kernel;
  kernel.use(self.storage().unsafeGetStorageImpl(), false);
  kernel.use(dst.storage().unsafeGetStorageImpl(), true);
  record_stream(dst.storage().data_ptr(), from);
  // The copy waits for earlier work on the destination's stream, and later work there waits for the copy.
  RecordedEvent(to).block(from);
  runtime().copy_async(data_of(dst, true), data_of(self, false), self.nbytes(), from);
  RecordedEvent(from).block(to);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& dst, bool non_blocking) {
  TORCH_CHECK(source.defined() && dst.defined(), "copy of an undefined tensor");
  check_not_forked();
  for (const at::Tensor& side : {source, dst}) {
    TORCH_CHECK_NOT_IMPLEMENTED(is_ours(side) || side.is_cpu(), "copy between ", source.device(), " and ", dst.device(),
                                " on the emulated accelerator");
  }
  const at::Tensor self = source.sizes() == dst.sizes() ? source : source.expand_as(dst);
  if (self.device() == dst.device()) {
    copy_within(self, dst);
    return dst;
  }
  if (self.numel() == 0) {
    return dst;
  }
  // As with CUDA: the source's device makes the tensor contiguous in the source's dtype, and the destination's device
  // converts it.
  const bool direct = same_bytes_layout(self, dst);
  const at::Tensor from = direct ? self : self.resolve_conj().resolve_neg().contiguous();
  const at::Tensor to =
      direct || same_bytes_layout(from, dst) ? dst : at::empty(from.sizes(), from.options().device(dst.device()));
  if (is_ours(self) && is_ours(dst)) {
    copy_between(from, to);
  } else {
    // A temporary on the host is read right below, so its copy is never non-blocking.
    copy_across(from, to, non_blocking && (to.is_same(dst) || is_ours(dst)));
  }
  if (!to.is_same(dst)) {
    at::Tensor target = dst;
    target.copy_(to);
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  at::Tensor target = dst;
  target.resize_(self.sizes());
  return target.copy_(self);
}

// item(): synchronises the stream.
at::Scalar local_scalar_dense(const at::Tensor& self) {
  check_not_forked();
  const Stream stream = current_stream(self.device().index());
  Operands operands(self.device().index());
  const at::Tensor cpu = operands.to_cpu(self, false);
  const std::array<Touch, 1> accesses{access_of(self, false)};
  runtime().begin_kernel(stream, accesses);
  runtime().synchronize_stream(stream);
  return at::native::_local_scalar_dense_cpu(cpu);
}

} // namespace

void register_copies(torch::Library& aten) {
  aten.impl("_copy_from", TORCH_FN(copy_from));
  aten.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  aten.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
}

} // namespace torch_uvm::emulated
