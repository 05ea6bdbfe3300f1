"""Moves under autograd, on CUDA."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_move_autograd", globals())
