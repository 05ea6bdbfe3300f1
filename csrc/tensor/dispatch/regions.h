// Storages that are used outside of an operator: by calls of compiled graphs, and by work that outlives its operator.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <memory>
#include <span>

#include "residency/engine/engine.h"

namespace torch_uvm {

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

} // namespace torch_uvm
