"""The functional form of a move, on CUDA."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_managed_copy", globals())
