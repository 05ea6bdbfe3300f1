"""Allocation plans on CUDA: iterations that match the plan, and iterations that do not."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_plans", globals())
