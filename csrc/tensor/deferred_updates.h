// Updates of parameters that an optimizer's step has left for later: each runs before its tensors' next use.
//
// - An update is the calls of operators that PyTorch's optimizer makes for one parameter, recorded at its step and
//   made later, in that order, as if they were made then: on the step's stream, below autograd and autocast.
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
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Stream.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <vector>

namespace torch_uvm {

class DeferredUpdate {
 public:
  /// To be run on the current stream of `device`, with the switch as the calling thread has it.
  explicit DeferredUpdate(c10::Device device);

  /// Another call. Its tensors are those of earlier results, or are kept, as they are now, until the update is done.
  /// \param results stand for what it will return that is new; empty for one that writes to its operands
  void add(const c10::OperatorHandle& op, torch::jit::Stack inputs, const std::vector<at::Tensor>& results);

  /// No call is added from now on: lets go of what stood for results.
  void seal();

  struct Access {
    const c10::StorageImpl* storage;
    bool writes;
  };
  const std::vector<Access>& accesses() const {
    return accesses_;
  }

  /// Makes the calls that were not made yet. \throws what they throw
  void run();

 private:
  struct Patch { ///< a tensor of an argument that is an earlier result
    std::size_t argument;
    std::size_t element; ///< of a list; ignored for a tensor
    std::size_t result;
  };
  struct Call {
    c10::OperatorHandle op;
    torch::jit::Stack inputs;
    std::vector<Patch> patches;
    std::size_t results; ///< tensors that it returns anew
  };

  at::Tensor keep(const at::Tensor& tensor, bool writes, Patch where, Call& call);
  void make(const Call& call);

  c10::Stream stream_;
  bool managed_;
  std::vector<Call> calls_;
  std::vector<Access> accesses_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> result_of_; ///< which result a stand-in is
  std::vector<at::Tensor> stand_ins_; ///< keep their addresses taken
  std::vector<std::size_t> last_use_; ///< of each result: the call after which it can go
  std::size_t next_ = 0;
  std::vector<at::Tensor> results_; ///< so far
};

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

/// Runs what uses a storage, reading or writing. \throws what an update throws; it is still pending then
void run_deferred_updates_of(const c10::StorageImpl* storage);
void run_deferred_updates_of(const at::Tensor& tensor);
/// \throws what the first one that fails throws, when all have been tried
void run_deferred_updates();

} // namespace torch_uvm
