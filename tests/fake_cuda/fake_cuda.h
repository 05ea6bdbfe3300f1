// How tests steer the fake CUDA runtime and ask what was done with it. Plain C, so that ctypes reaches it.
//
// The environment, read at the first call:
//   FAKE_CUDA_DEVICES=2        devices (default 1)
//   FAKE_CUDA_MEMORY=bytes     of each device (default 256 MiB)
//   FAKE_CUDA_FAIL=name:n,...  the n-th call of that name fails, as if memory were short
//   FAKE_CUDA_CONCURRENT=0     host and device may not touch managed memory at once
//   FAKE_CUDA_PROFILE=gb10     the attributes of a machine: h200 (default), gb10 (integrated: the GPU uses the host's
//                              memory) or gh200 (two memories, coherent through the host's page tables)
//   FAKE_CUDA_MANAGED_FIXED=1  managed memory takes its device's memory, and no driver evicts it
//   FAKE_CUDA_REPORT=path      misuse is appended there, too
#pragma once

#include <cstddef>

extern "C" {

/// How often a function was called, failed calls included.
std::size_t fake_cuda_count(const char* name);
/// From now on the `nth` call of `name` fails with `error` (a cudaError_t); 1 is the next one.
void fake_cuda_fail(const char* name, std::size_t nth, int error);
/// While on, work that is queued is not done before somebody waits for it.
void fake_cuda_hold(int on);
/// As after the process's main has returned: every call answers cudaErrorCudartUnloading.
void fake_cuda_unload(int on);
/// What was done that a real GPU would punish, a line each; the list is emptied. Valid until the next call.
const char* fake_cuda_misuse();
/// Live allocations made by `name` ("cudaMallocManaged", ...), and their bytes.
std::size_t fake_cuda_live(const char* name);
std::size_t fake_cuda_live_bytes(const char* name);
/// Whether a context was made on that device.
int fake_cuda_has_context(int device);
/// Attributes and contents as at the start, with these devices; what is allocated becomes unknown.
void fake_cuda_reset(int devices, std::size_t memory, int concurrent, const char* profile);

} // extern "C"
