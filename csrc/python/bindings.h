// The parts of the extension module, a file each; module.cpp calls them. What a binding does with the GIL.
//
// Locks of ours are held across waits for a device. A thread that has the GIL and waits for such a lock stops all
// Python threads. Each binding names one of `no_gil`, `no_gil_inside` and `keeps_gil`; tests/test_gil.py reads the
// source and fails for a binding that names none. A class whose destructor allocates, frees or takes a lock names
// `pybind11::release_gil_before_calling_cpp_dtor()`.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

namespace torch_uvm {

/// The call runs without the GIL; conversions have it. Not for `py::init` of a function, which registers the object.
inline const pybind11::call_guard<pybind11::gil_scoped_release> no_gil;

/// The call has the GIL, for Python objects, and hands the rest to `without_gil`.
struct NoGilInside {};
inline constexpr NoGilInside no_gil_inside;

/// The call has the GIL. It allocates no managed memory, runs no operator and waits for no lock but those of a few
/// instructions, under which nothing is called.
struct KeepsGil {};
inline constexpr KeepsGil keeps_gil;

/// What `call` returns, which is no Python object.
template <typename Call>
auto without_gil(Call&& call) {
  const pybind11::gil_scoped_release released;
  return std::forward<Call>(call)();
}

void register_exceptions(pybind11::module_& module); ///< exceptions.cpp
void bind_tensor(pybind11::module_& module); ///< tensor.cpp: switch, options, managed tensors, statistics
void bind_allocators(pybind11::module_& module); ///< allocators.cpp: those that a user makes and chooses
void bind_hints(pybind11::module_& module); ///< hints.cpp: prefetch, advise, discard, residency
void bind_budgets(pybind11::module_& module); ///< budgets.cpp: budgets as they are asked for
void bind_residency(pybind11::module_& module); ///< residency.cpp: budgets, and what the engine does about them
void bind_origins(pybind11::module_& module); ///< origins.cpp: which line made what, for a report
void bind_deferred(pybind11::module_& module); ///< deferred.cpp: optimizers' updates that wait
void bind_regions(pybind11::module_& module); ///< regions.cpp: compiled graphs, captures
void bind_host_tensors(pybind11::module_& module); ///< host_tensors.cpp: managed memory for CPU tensors
void bind_exchange(pybind11::module_& module); ///< exchange.cpp: DLPack, sharing between processes
void bind_replay(pybind11::module_& module); ///< replay.cpp: allocations written down, and done again
void bind_emulated(pybind11::module_& module); ///< emulated.cpp: the emulated accelerator
void bind_planted_faults(pybind11::module_& module); ///< planted_faults.cpp: in builds under a sanitizer only
void bind_cuda(pybind11::module_& module); ///< cuda.cpp: CUDA's place in PyTorch
/// test_bindings.cpp; nullptr where setup.py has left that out, as of wheels: TORCH_UVM_TEST_BINDINGS.
[[gnu::weak]] void bind_test_bindings(pybind11::module_& module);

} // namespace torch_uvm

// For the reader, and the test, alone: pybind11 does nothing for them.
template <>
struct pybind11::detail::process_attribute<torch_uvm::NoGilInside> : process_attribute_default<torch_uvm::NoGilInside> {
};
template <>
struct pybind11::detail::process_attribute<torch_uvm::KeepsGil> : process_attribute_default<torch_uvm::KeepsGil> {};
