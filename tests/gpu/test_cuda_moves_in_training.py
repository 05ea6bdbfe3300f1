"""Moves under autograd, repeated round trips, and moves of modules, on CUDA."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_moves_in_training", globals())
