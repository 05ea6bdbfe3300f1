// The parts of the extension module, one per file, and the GIL policies of bindings.
//
// Some of our locks are held while a thread waits for a device. A thread that waits for such a lock with the GIL blocks
// all Python threads. So each binding names one of `no_gil`, `no_gil_inside` and `keeps_gil`; tests/test_gil.py reads
// the source and fails for a binding that names none. A class whose destructor allocates, frees or locks names
// `pybind11::release_gil_before_calling_cpp_dtor()`.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <utility>

#include "runtime/location.h"

namespace torch_uvm {

/// The call runs without the GIL; argument conversions run with it. Not for `py::init` of a function, because pybind11
/// registers the object inside that call.
inline const pybind11::call_guard<pybind11::gil_scoped_release> no_gil;

/// The call runs with the GIL, to use Python objects, and passes all other work to `without_gil`.
struct NoGilInside {};
inline constexpr NoGilInside no_gil_inside;

/// The call runs with the GIL. It allocates no managed memory and runs no operator. It takes only locks that are held
/// for a few instructions, with no calls under them.
struct KeepsGil {};
inline constexpr KeepsGil keeps_gil;

/// Runs `call` without the GIL and returns its result, which must not be a Python object.
template <typename Call>
auto without_gil(Call&& call) {
  const pybind11::gil_scoped_release released;
  return std::forward<Call>(call)();
}

/// A CPU device is the host.
inline Location location_of(const c10::Device& device) {
  return device.is_cpu() ? Location::host() : Location::device(std::max<int>(device.index(), 0));
}

void bind_tensor(pybind11::module_& module); ///< tensor.cpp: switch, options, managed tensors, hints
void bind_allocators(pybind11::module_& module); ///< allocators.cpp: allocators, logs and replays of them
void bind_residency(pybind11::module_& module); ///< residency.cpp: budgets, the residency engine
void bind_replaced_functions(pybind11::module_& module); ///< replaced_functions.cpp: methods of PyTorch, in place
void bind_schedules(pybind11::module_& module); ///< schedules.cpp: schedules of recorded traces
void bind_allocation_sites(pybind11::module_& module); ///< allocation_sites.cpp: the allocation-site profiler
void bind_deferred(pybind11::module_& module); ///< deferred.cpp: deferred optimizer updates
void bind_regions(pybind11::module_& module); ///< regions.cpp: compiled graphs, captures
void bind_exchange(pybind11::module_& module); ///< exchange.cpp: DLPack, sharing between processes
void bind_emulated(pybind11::module_& module); ///< emulated.cpp: the emulated accelerator
/// tests/cpp/doubles; nullptr unless setup.py compiled that file (TORCH_UVM_TEST_BINDINGS=1; never for wheels).
[[gnu::weak]] void bind_test_bindings(pybind11::module_& module);

} // namespace torch_uvm

// These two policies exist for readers and for tests/test_gil.py; pybind11 ignores them.
template <>
struct pybind11::detail::process_attribute<torch_uvm::NoGilInside> : process_attribute_default<torch_uvm::NoGilInside> {
};
template <>
struct pybind11::detail::process_attribute<torch_uvm::KeepsGil> : process_attribute_default<torch_uvm::KeepsGil> {};
