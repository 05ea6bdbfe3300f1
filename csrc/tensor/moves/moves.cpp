// The kernel of a move, which synchronises as its contract requires and makes the view with the new label, and that of
// a managed copy.
#include "tensor/moves/moves.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorOptions.h>

#include <algorithm>
#include <vector>

#include "runtime/error.h"
#include "tensor/dispatch/kernels.h"
#include "tensor/hints/hints.h"
#include "tensor/process/context.h"
#include "tensor/process/machine.h"
#include "tensor/process/streams.h"
#include "tensor/process/switch.h"
#include "tensor/storage/adopted_storage.h"
#include "tensor/storage/block_storage.h"
#include "tensor/storage/labels.h"
#include "tensor/storage/managed_storage.h"
#include "tensor/storage/user_allocators.h"

namespace torch_uvm {
namespace {

/// The streams that have pending work and may touch the block: those that the allocator knows, and the current stream
/// of the label's device.
std::vector<Stream> busy_streams(const Block* block, const c10::DataPtr& data) {
  Context& context = Context::get();
  const c10::Device label = data.device();
  const c10::DataPtr& bytes = data_behind_labels(data);
  std::vector<Stream> streams =
      is_from_allocator(bytes) ? allocator_streams(bytes) : context.managed_allocator().streams(block);
  if (!label.is_cpu()) {
    const Stream current = current_stream_of(label);
    if (std::ranges::find(streams, current) == streams.end()) {
      streams.push_back(current);
    }
  }
  std::erase_if(streams, [&](Stream stream) { return context.runtime().query_stream(stream); });
  return streams;
}

void synchronise(const at::Tensor& self, c10::Device to, bool non_blocking) {
  const c10::DataPtr& data = data_of(self.storage());
  if (const c10::DataPtr& bytes = data_behind_labels(data); is_adopted(bytes)) {
    if (!to.is_cpu() || !non_blocking) {
      wait_for_adopted(bytes);
    }
    if (!to.is_cpu()) {
      note_adopted_use(bytes, to.index());
    }
    return;
  }
  Block* block = block_of(data);
  if (block == nullptr || self.numel() == 0) {
    return;
  }
  CachingManagedAllocator& allocator = Context::get().managed_allocator();
  const bool shares_block = is_from_allocator(data_behind_labels(data)); // with tensors that do not move
  if (to.is_cpu()) {
    // Wait for events, not streams: work that other threads queue from now on is not waited for.
    if (!non_blocking) {
      for (const Stream stream : busy_streams(block, data)) {
        RecordedEvent(stream).synchronize();
      }
      // Without concurrentManagedAccess the host must not touch managed memory while the device runs any work.
      for (const int device : Machine::get().exclusive_devices()) {
        Context::get().runtime().synchronize_device(device);
      }
    }
    // The old label's current stream may still use the bytes, and need not be the block's stream.
    if (non_blocking && !self.device().is_cpu()) {
      record_stream(data, current_stream_of(self.device()));
    }
    if (!shares_block) {
      allocator.set_home(block, Location::host(), Stream::host());
    }
    return;
  }
  const Stream stream = current_stream_of(to);
  for (const Stream earlier : busy_streams(block, data)) {
    if (earlier != stream) {
      RecordedEvent(earlier).block(stream);
    }
  }
  prefetch_range_of(self, Location::device(to.index()), stream);
  if (shares_block) {
    record_stream(data, stream);
  } else {
    allocator.set_home(block, Location::device(to.index()), stream);
  }
}

} // namespace

at::Tensor move_kernel(const at::Tensor& self, c10::Device to, bool non_blocking) {
  TORCH_CHECK_VALUE(
      is_managed(self),
      "a move of a tensor that is not managed; torch_uvm.to(t, device, managed=True) makes a managed copy");
  TORCH_CHECK(!Context::get().forked(),
              "a move in a forked process: its devices belong to the parent, and it has the bytes of CPU labels only");
  const c10::Device device = resolve_device(to, "a move to");
  Kernel kernel;
  kernel.use(self.storage().unsafeGetStorageImpl(), /*writes=*/false);
  // The watcher has fetched this operand to its device, unless there was no room.
  TORCH_CHECK_WITH(OutOfMemoryError, !is_on_host(data_of(self.storage())), "a move of ", self.nbytes(),
                   " bytes that the budget of ", self.device(), " has no room for now: they are on the host");
  try {
    synchronise(self, device, non_blocking);
  } catch (const InvalidArgument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
  c10::Allocator* allocator = device.is_cpu() ? c10::GetCPUAllocator() : c10::GetAllocator(device.type());
  const c10::DispatchKey key = c10::computeDispatchKey(std::nullopt, std::nullopt, device);
  // As for PyTorch's views: the view of a normal tensor is a normal tensor, even in inference mode.
  const c10::InferenceMode as_it_is(self.is_inference());
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(with_label(self.storage(), device, allocator),
                                                             c10::DispatchKeySet(key), self.dtype());
  c10::TensorImpl* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(self.storage_offset());
  impl->set_sizes_and_strides(self.sizes(), self.strides());
  impl->_set_conj(self.is_conj());
  impl->_set_neg(self.is_neg());
  if (!self.is_inference()) {
    impl->set_version_counter(self.unsafeGetTensorImpl()->version_counter());
  }
  return view;
}

at::Tensor move(const at::Tensor& self, c10::Device device, bool non_blocking) {
  return move_operator().call(self, device, non_blocking);
}

// --- managed copies

at::Tensor empty_strided_managed(at::IntArrayRef size, at::IntArrayRef stride, c10::ScalarType dtype,
                                 c10::Device device) {
  if (!device.is_cpu()) {
    TORCH_CHECK_VALUE(device.type() == at::getAccelerator(), "managed memory on ", device,
                      "; accepted: the CPU and the accelerator");
    Context::get().runtime(); // on CUDA this installs the allocator that respects the switch
    const ManagedScope on(true);
    at::Tensor tensor = at::empty_strided(size, stride, at::TensorOptions().device(device).dtype(dtype));
    TORCH_CHECK(is_managed(tensor), "managed memory on ", device,
                " inside a graph capture or a memory pool, which decide on the memory in their scope; make the tensor "
                "outside of it");
    return tensor;
  }
  const std::size_t bytes = at::detail::computeStorageNbytes(size, stride, c10::elementSize(dtype));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                       allocate_managed(bytes, Location::host(), Stream::host(), device), c10::GetCPUAllocator(),
                       // Growing would allocate from the CPU's allocator, whose memory is not managed.
                       /*resizable=*/false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return tensor;
}

at::Tensor managed_copy_kernel(const at::Tensor& self, c10::Device to, c10::ScalarType dtype, bool non_blocking,
                               c10::MemoryFormat memory_format) {
  TORCH_CHECK_VALUE(self.layout() == c10::kStrided && !self.is_quantized(), "a managed copy of a tensor of layout ",
                    self.layout(), " and dtype ", self.scalar_type(), "; accepted: strided tensors, not quantised");
  TORCH_CHECK_VALUE(!c10::isQIntType(dtype), "a managed copy of dtype ", dtype,
                    "; accepted: dtypes that are not quantised");
  const c10::Device device = resolve_device(to, "a managed copy to");
  const at::Tensor form = at::empty_like(self, at::TensorOptions().device(c10::kMeta).dtype(dtype), memory_format);
  return empty_strided_managed(form.sizes(), form.strides(), dtype, device).copy_(self, non_blocking);
}

} // namespace torch_uvm
