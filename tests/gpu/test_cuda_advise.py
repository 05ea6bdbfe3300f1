"""Advice on CUDA, as seen by the calls. Its effect on pages is tested in test_cuda_pages.py."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_advise", globals())
