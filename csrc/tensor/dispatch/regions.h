// Storages that are used outside of observed operators: by compiled graphs, and by asynchronous work that continues
// after its operator has returned.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <memory>
#include <span>

#include "residency/engine/engine.h"

namespace torch_uvm {

/// A call of a compiled graph, or a launch of a Triton kernel. Its kernels are not observed, so the engine treats the
/// whole call as one operator on its inputs and on the storages that it creates. Operators that it calls count as
/// nested.
class Region {
 public:
  struct Input {
    c10::StorageImpl* storage;
    bool writes;
  };
  /// Begins a call while no device is watched: it is only counted, as a device may wake during the call.
  /// \return nullptr if a device is watched; call `enter` then
  static std::unique_ptr<Region> enter_unwatched(Engine& engine);
  /// Makes the inputs ready and pins them.
  /// \param key identifies the graph, or the kernel
  /// \param name must outlive the call
  /// \return nullptr if a CUDA graph is being captured, or if the call is nested in an operator (which pins the inputs
  ///         then)
  static std::unique_ptr<Region> enter(Engine& engine, std::uint64_t key, const char* name,
                                       std::span<const Input> inputs);
  /// Ends the call, on the thread that entered. \param outputs storages that live on after the call
  void leave(std::span<c10::StorageImpl* const> outputs) noexcept;
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

 private:
  Region() = default;
  Engine::Frame frame_;
  bool seen_ = false; ///< false: no device was watched on entry, and the call is only counted
  bool open_ = true;
};

/// Pins storages at their address, as a running operator does, for asynchronous work that continues after its operator
/// has returned, or for code whose uses are declared. Any thread may end it.
class WorkUnderWay {
 public:
  /// Within that operator.
  explicit WorkUnderWay(std::span<const at::Tensor> tensors);
  /// On the operands of an operator. Requires the engine's lock.
  explicit WorkUnderWay(const Engine::Frame& frame);
  /// An operator that ends at once makes the inputs ready.
  WorkUnderWay(Engine& engine, std::uint64_t key, const char* name, std::span<const Region::Input> inputs);
  ~WorkUnderWay() {
    end();
  }
  void end() noexcept;
  WorkUnderWay(const WorkUnderWay&) = delete;
  WorkUnderWay& operator=(const WorkUnderWay&) = delete;

 private:
  void hold(Record* record);
  std::unique_ptr<Region> unwatched_; ///< no device was watched: nothing moves before it ends
  Engine::Frame frame_;
};

} // namespace torch_uvm
