"""Logs replayed on CUDA's managed memory: figures, the command, what it refuses."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_replay", globals())
