"""The hints as operators and calls, on CUDA. Their effect on pages is in test_cuda_pages.py."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_hint_calls", globals())
