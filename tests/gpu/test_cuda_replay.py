"""Logs replayed on CUDA's managed memory: figures, command line, errors."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_replay", globals())
