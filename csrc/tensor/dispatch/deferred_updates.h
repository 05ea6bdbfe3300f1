// The table of pending deferred updates. Each update runs before the next conflicting use of its tensors.
//
// - A use conflicts if it reads a tensor that the update writes, or writes one that the update reads. Reading a tensor
//   that the update only reads does not run it.
// - Uses are operators (the watcher runs the updates, on the thread that called the operator) and addresses that leave
//   PyTorch.
// - Until it has run, PyTorch refuses the addresses of the tensors that it writes: code that is no operator and did not
//   ask for them raises, and never reads old values.
// - An update runs once. If it fails, its tensors refuse access with the error, and the next conflicting use resumes at
//   the call that failed.
//
// Running or waiting for an update calls no Python and takes no GIL: the tensors that an update owns have no Python
// object, and the allocation-site profiler does not look for a Python line while an update
// runs. The table's mutex is a leaf: nothing is called with it held.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace torch_uvm {

c10::Stream current_stream(c10::Device device);

/// Makes future work on `later` wait for the work queued on `earlier`.
void wait_for(c10::Stream earlier, c10::Stream later);

/// A deferred update of one parameter, or of small ones together (deferred_update.cpp): the operator calls that
/// PyTorch's optimizer makes for them, recorded during `step()` and replayed later.
///
/// Replay keeps the order of the calls and the context of the step: its stream, below autograd and autocast. The
/// tensors that an update owns have no Python object, so it runs and is destroyed without the GIL.
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

/// Whether any update is pending. One relaxed load.
bool has_deferred_updates() noexcept;
std::size_t deferred_updates();

/// Whether a use may have to run an update, or to wait for one that ran on another stream. Two relaxed loads.
bool may_need_updates() noexcept;

/// Whether the calling thread is running an update.
bool runs_deferred_update() noexcept;

/// Makes the updates pending. A use that conflicts with several runs them in this order.
/// \param is_in_use whether a running operator uses what the update writes. Its kernel may ask for the address at any
///        time, so the address is not refused
void defer(std::vector<std::unique_ptr<DeferredUpdate>> updates,
           c10::function_ref<bool(const DeferredUpdate&)> is_in_use);

/// Runs the updates that conflict with an operator on these inputs. Does not throw: if an update fails, the tensors
/// that it writes refuse access with its error until it has run.
/// \param writes whether the operator writes to the input at an index
void run_deferred_updates_before(c10::ArrayRef<c10::IValue> inputs,
                                 c10::function_ref<bool(std::size_t)> writes) noexcept;

/// Makes the calling thread's current stream wait for updates that wrote these inputs on another stream. A wait made
/// by the program right after `step()` does not cover them: the updates were queued later.
void wait_for_deferred_updates(c10::ArrayRef<c10::IValue> inputs) noexcept;

/// Runs all updates that read or write the tensors' storages. \throws what an update throws; it stays pending then
void run_deferred_updates_of(at::TensorList tensors);
/// The same, for an address that leaves PyTorch: the host also waits until the writes of past updates to the storage
/// are complete.
void finish_deferred_updates_of(c10::StorageImpl* storage);
void finish_deferred_updates_of(const at::Tensor& tensor);
/// Runs all pending updates. \throws the first error, after all have been tried
void run_deferred_updates();

// --- which updates to defer (deferrable.cpp)

/// Selects the parameter updates of an optimizer step that can be deferred.
/// \param operands parameters, gradients and tensor state, one list each, all of the same length
/// \return the indices of the parameters whose update can be deferred, in ascending order, in groups that are updated
///         together. Empty if updating them in groups might not be bit-identical (foreach kernels look at all of their
///         tensors), or if written tensors share storage
std::vector<std::vector<std::size_t>> deferrable(const std::vector<std::vector<at::Tensor>>& operands);

/// `defer`, beside operators that other threads run. Takes the engine's lock.
void defer_beside_operators(std::vector<std::unique_ptr<DeferredUpdate>> updates);

} // namespace torch_uvm
