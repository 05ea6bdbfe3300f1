"""Ranges of bytes that tensors have, on CUDA."""

from _cases import run_on_cuda

run_on_cuda("test_ranges", globals())
