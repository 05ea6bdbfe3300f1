// An update of a parameter that is made later: the calls of operators that PyTorch's optimizer makes for it, recorded
// at its step.
//
// They are made in their order and as if they were made then: on the step's stream, below autograd and autocast. What
// an update holds has no Python object of its own, so that it runs, and goes, without the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstddef>
#include <exception>
#include <unordered_map>
#include <vector>

namespace torch_uvm {

c10::Stream current_stream(c10::Device device);

/// What comes next on `later` waits for what is queued on the other.
void wait_for(c10::Stream earlier, c10::Stream later);

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

  /// Has whoever takes the address of a storage that it writes told why not, as a kernel does; and no longer.
  void refuse_use(const std::exception_ptr& error) const noexcept;
  void accept_use() const;

  c10::Stream stream() const {
    return stream_;
  }

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

} // namespace torch_uvm
