// Updates of parameters that an optimizer's step has left for later: each runs before its tensors' next use.
//
// - Whoever looks at a tensor that an update writes to, or writes to one that it reads, has it run first: operators
//   by the watcher, on the thread that called them, and addresses that leave PyTorch. Reading what it only reads runs
//   nothing.
// - It runs once. One that fails goes on, the next time, at the call that failed; until then whoever uses its tensors
//   is told.
//
// No Python is called and no GIL is taken while one runs or is waited for: what an update holds has no Python object
// of its own. Its mutex is taken last, and nothing is called with it held.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "tensor/dispatch/deferred_update.h"

namespace torch_uvm {

/// One relaxed load.
bool has_deferred_updates() noexcept;
std::size_t deferred_updates();

/// Whether the calling thread runs one now.
bool runs_deferred_update() noexcept;

/// From now on they run when somebody looks. They are run in this order where one look is at several.
void defer(std::vector<std::unique_ptr<DeferredUpdate>> updates);

/// Runs what an operator with these inputs has to wait for. Does not throw: tensors whose update failed refuse their
/// use, with its error, until it has been run.
/// \param writes whether the operator writes to an input
void run_deferred_updates_before(c10::ArrayRef<c10::IValue> inputs,
                                 c10::function_ref<bool(std::size_t)> writes) noexcept;

/// Whoever has waited for the step's stream after the step, but before the update ran there, has to wait again: so
/// the calling thread's current stream waits, where an operator with these inputs uses what an update on another
/// stream has written.
void wait_for_deferred_updates(c10::ArrayRef<c10::IValue> inputs) noexcept;

/// Runs what uses a storage, reading or writing. \throws what an update throws; it is still pending then
void run_deferred_updates_of(const at::Tensor& tensor);
/// The same for an address that leaves PyTorch; the host waits for what updates have written since it last did.
void finish_deferred_updates_of(c10::StorageImpl* storage);
void finish_deferred_updates_of(const at::Tensor& tensor);
/// \throws what the first one that fails throws, when all have been tried
void run_deferred_updates();

} // namespace torch_uvm
