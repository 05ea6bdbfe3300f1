// Sees operators go by, and tells the residency engine.
//
// A callback of at::RecordFunction runs before and after each operator, on the thread that runs it, in backward too. It
// is there only while a device has a budget that steps may run against (residency/engine/sleep.cpp): with a callback
// that does nothing, a step that is bound by the host takes 1.2 to 1.4 times as long.
//
// - An outermost operator of a thread has its operands made ready, and held until it ends. Operators within it find
//   theirs where they are: an enclosing kernel may hold the pointers.
// - Views touch no bytes, and some wrappers (functorch's, autograd's) hold tensors with no storage: what is within
//   them is outermost.
// - What an operator writes is what its schema says, and running statistics of a batch norm, of which it says nothing.
// - It throws nothing: PyTorch would swallow it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <optional>
#include <span>

#include "residency/engine/engine.h"

namespace torch_uvm {

/// The process's engine, made with the first budget; nullptr before.
Engine* engine_in_use();

/// As Engine::set_budget; puts the watcher in place, or takes it away.
void set_budget(int device, std::optional<std::size_t> bytes, bool hard);
void set_host_limit(std::optional<std::size_t> bytes);
void set_staging(std::optional<std::size_t> slot_bytes);
void evict_after_operators(bool on);

/// Puts the watcher in place, or takes it away, as the engine needs it.
void watch_operators() noexcept;

/// Before an address leaves PyTorch; ignored for storages that are not watched.
void settle(const at::Tensor& tensor);
/// Brings the storage to its device and holds it there, or lets go of it again. Ignored where no device has a budget.
void keep_resident(const at::Tensor& tensor, bool keep);

/// Tells the engine of storages that were there before there was a budget; what it knows, it can give up.
void make_known(const std::vector<at::Tensor>& tensors);

/// A call of a compiled graph, which is to the engine what an operator is: kernels run that nobody sees, on its inputs
/// and on storages that it makes. Operators within it are within an operator.
class Region {
 public:
  struct Input {
    c10::StorageImpl* storage;
    bool writes;
  };
  /// Makes the inputs ready and holds them.
  /// \param key of the graph
  /// \return nullptr: nothing is watched, or the call is within an operator, which holds them too
  static std::unique_ptr<Region> enter(std::uint64_t key, std::span<const Input> inputs);
  /// On the thread that entered. \param outputs storages that outlive it
  void leave(std::span<c10::StorageImpl* const> outputs) noexcept;
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

 private:
  explicit Region(bool seen);
  Engine::Frame frame_;
  bool seen_; ///< else the engine sleeps
  bool open_ = true;
};

/// Keeps storages where they are, as an operator that runs does, for work that goes on after its operator has returned.
/// Made within that operator; let go of on any thread.
class WorkUnderWay {
 public:
  explicit WorkUnderWay(std::span<const at::Tensor> tensors);
  ~WorkUnderWay();
  WorkUnderWay(const WorkUnderWay&) = delete;
  WorkUnderWay& operator=(const WorkUnderWay&) = delete;

 private:
  Engine::Frame frame_;
};

/// A kernel on the host that reads addresses of storages. Where the watcher has not seen its operator begin, it is
/// counted; if the engine is awake by now, it holds its storages as the operator would.
class Kernel {
 public:
  Kernel();
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  /// Before an address of the storage is read.
  void use(c10::StorageImpl* storage, bool writes);

  /// All kernels have this object from now on, as those of the emulated accelerator do.
  static void count();
  /// Kernels that run unseen; nullopt: not all kernels are counted.
  static std::optional<int> unseen() noexcept;

 private:
  Engine::Frame frame_;
  bool counted_ = false;
  bool holds_ = false;
};

/// A capture into a graph has begun: what is captured from now on stays where it is (Engine::begin_capture), as does
/// what the compiled graph holds that this thread runs. 0: there is no managed memory.
std::uint64_t begin_capture();
void end_capture(std::uint64_t capture) noexcept;
/// On the calling thread's current stream of the current device.
void note_replay(std::uint64_t capture);
void release_capture(std::uint64_t capture) noexcept;

/// A managed block is about to be freed. \return whether `note_freed` is to be called when that is done
bool forget_record(Block* block);
/// One of the storages on a managed block has died, and others live on.
void forget_outlived(Block* block);
void note_freed() noexcept;

/// Managed memory of a device was given out.
void note_allocation(int device, std::size_t bytes);

/// A storage that the engine has on the host: its pointer is pinned memory, its context a record.
bool is_on_host(const c10::DataPtr& data);

/// For CUDA: whether a graph is being captured. Set once.
void set_capture_probe(bool (*is_capturing)());

} // namespace torch_uvm
