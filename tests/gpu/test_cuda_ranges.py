"""Byte ranges of tensors, on CUDA."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_ranges", globals())
