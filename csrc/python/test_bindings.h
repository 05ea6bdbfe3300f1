// Declarations shared by the files of test bindings.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>

#include "python/bindings.h"

namespace torch_uvm {

void bind_test_allocator(pybind11::module_& classes); ///< defined in test_bindings_allocator.cpp

inline std::uintptr_t address_of(const void* ptr) {
  return reinterpret_cast<std::uintptr_t>(ptr);
}

inline void* pointer_of(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);
}

/// Wraps a property's getter or setter so that it runs without the GIL. A call_guard beside a property does not apply
/// to it.
template <typename Call>
pybind11::cpp_function unlocked(Call call) {
  return {std::move(call), no_gil};
}

} // namespace torch_uvm
