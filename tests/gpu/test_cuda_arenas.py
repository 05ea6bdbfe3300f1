"""Arenas on CUDA: scopes, what outlives them, training, streams, threads."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_arenas", globals())
