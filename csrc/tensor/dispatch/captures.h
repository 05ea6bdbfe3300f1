// Graph captures (CUDA graphs): storages used during a capture keep their address until the graph is destroyed.
#pragma once

#include <cstdint>

namespace torch_uvm {

/// Begins a capture: storages that captured operators use are pinned at their address (Engine::begin_capture). So are
/// the operands of the operator or compiled graph that the calling thread is running, and storages whose address is
/// asked for.
/// \return the id for end_engine_capture and the functions below; 0 if there is no managed memory, or in a forked child
std::uint64_t begin_capture();
/// A captured graph is about to be launched on the calling thread's current stream of the current device.
void note_launch(std::uint64_t capture);
void release_capture(std::uint64_t capture) noexcept;

/// Installs the function that tells whether the calling thread's current stream is being captured; CUDA sets it once.
void set_capture_probe(bool (*is_capturing)());
/// Whether the calling thread's current stream is being captured; false if no probe is installed.
bool is_capturing();

} // namespace torch_uvm
