// Captures into graphs of the device: what they hold keeps its address for as long as the graph lives.
#pragma once

#include <cstdint>

namespace torch_uvm {

/// A capture into a graph has begun: what is captured from now on stays where it is (Engine::begin_capture), as does
/// what the compiled graph holds that this thread runs. 0: there is no managed memory.
std::uint64_t begin_capture();
void end_capture(std::uint64_t capture) noexcept;
/// On the calling thread's current stream of the current device.
void note_replay(std::uint64_t capture);
void release_capture(std::uint64_t capture) noexcept;

/// For CUDA: whether a graph is being captured. Set once.
void set_capture_probe(bool (*is_capturing)());
/// Whether one is being captured on the calling thread.
bool is_capturing();

} // namespace torch_uvm
