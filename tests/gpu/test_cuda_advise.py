"""Advice on CUDA, as far as the calls tell; its effect on pages is in test_cuda_pages.py."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_advise", globals())
