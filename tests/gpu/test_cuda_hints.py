"""Hints that change no result, on CUDA; what they do to pages is in test_cuda_pages.py."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_hints", globals())
