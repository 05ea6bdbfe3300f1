"""Managed CPU tensors in threads, training and other processes, beside a GPU."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_host_tensor_programs", globals())
