"""Discard and residency on CUDA. The effect of hints on pages is in test_cuda_pages.py."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_hints", globals())
