"""Arenas on CUDA: scopes, allocations that outlive them, training, streams, threads."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_arenas", globals())
