// A deferred update of one parameter, or of small ones together: the operator calls that PyTorch's optimizer makes for
// them, recorded during `step()` and replayed later.
//
// Replay keeps the order of the calls and the context of the step: its stream, below autograd and autocast. The tensors
// that an update owns have no Python object, so it runs and is destroyed without the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstddef>
#include <exception>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace torch_uvm {

c10::Stream current_stream(c10::Device device);

/// Makes future work on `later` wait for the work queued on `earlier`.
void wait_for(c10::Stream earlier, c10::Stream later);

class DeferredUpdate {
 public:
  /// Remembers the current stream of `device` and the calling thread's managed-memory switch for `run`.
  explicit DeferredUpdate(c10::Device device);

  /// Records a call. An input that is a stand-in is replaced by the actual result in `run`. Other tensors are kept
  /// alive until the update is destroyed, with the storage that they have now.
  /// \param results stand-ins for the new tensors that the call will return; empty for an in-place call
  void add(const c10::OperatorHandle& op, torch::jit::Stack inputs, const std::vector<at::Tensor>& results);

  /// Ends recording: releases the stand-ins.
  void seal();

  /// The storages that it uses, and whether it writes them.
  const std::unordered_map<const c10::StorageImpl*, bool>& accesses() const {
    return accesses_;
  }

  /// Makes the remaining calls. After a failure the next `run` resumes at the call that failed. \throws what a call
  /// throws
  void run();

  /// Makes PyTorch refuse the data pointers that the update writes, with this message, to kernels and to all other
  /// code; `accept_use` undoes that.
  /// \param error whose text is appended; null: none
  void refuse_use(std::string_view message, const std::exception_ptr& error = nullptr) const noexcept;
  void accept_use() const noexcept;

  c10::Stream stream() const {
    return stream_;
  }

 private:
  struct Patch { ///< an input tensor that is the result of an earlier call
    std::size_t argument;
    std::size_t element; ///< index in a list argument; ignored for a tensor
    std::size_t result;
  };
  struct Call {
    c10::OperatorHandle op;
    torch::jit::Stack inputs;
    std::vector<Patch> patches;
    std::size_t results; ///< number of new tensors that it returns
  };

  at::Tensor keep(const at::Tensor& tensor, bool writes, Patch where, Call& call);
  void make(const Call& call);

  c10::Stream stream_;
  bool managed_;
  std::vector<Call> calls_;
  std::unordered_map<const c10::StorageImpl*, bool> accesses_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> result_of_; ///< stand-in to index of its result
  std::vector<at::Tensor> stand_ins_; ///< kept alive so that no other tensor gets their address
  std::vector<std::size_t> last_use_; ///< by result: the call after which it can be released
  std::size_t next_ = 0;
  std::vector<at::Tensor> results_; ///< of the calls made so far
};

} // namespace torch_uvm
