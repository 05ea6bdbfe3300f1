// The smallest storage that the residency engine moves.
#pragma once

#include <atomic>
#include <cstddef>

#include "config/options.h"

namespace torch_uvm {

namespace detail {
/// Process-wide: it is read before there is an engine.
inline std::atomic<std::size_t> relocation_min{kDefaultRelocationMin};
} // namespace detail

/// Smaller storages stay where they are: moving them costs more than it frees. One relaxed load.
inline std::size_t relocation_min() noexcept {
  return detail::relocation_min.load(std::memory_order_relaxed);
}

/// Applies to storages that are used from now on. Storages that the engine already tracks remain tracked.
inline void set_relocation_min(std::size_t bytes) noexcept {
  detail::relocation_min.store(bytes, std::memory_order_relaxed);
}

} // namespace torch_uvm
