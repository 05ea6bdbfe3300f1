"""Moves on CUDA: each row of the contract of `to`, from the CPU suite."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_moves", globals())
