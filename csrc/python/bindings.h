// The parts of the extension module, a file each; module.cpp calls them.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_uvm {

void register_exceptions(pybind11::module_& module); ///< exceptions.cpp
void bind_floors(pybind11::module_& module); ///< floors.cpp: submodule `floors`, for tests
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
void bind_cuda(pybind11::module_& module); ///< cuda.cpp: CUDA's place in PyTorch

} // namespace torch_uvm
