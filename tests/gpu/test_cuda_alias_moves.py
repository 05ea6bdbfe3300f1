"""`enable(moves="alias")` on CUDA."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_alias_moves", globals())
