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
#include <ATen/core/ivalue.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "tensor/dispatch/deferred_update.h"

namespace torch_uvm {

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
