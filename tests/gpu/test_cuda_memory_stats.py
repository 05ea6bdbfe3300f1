"""The statistics of managed memory, on CUDA."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_memory_stats", globals())
