"""Moves, copies and resizes of managed CPU tensors, on CUDA."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_host_tensor_moves", globals())
