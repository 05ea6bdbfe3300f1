"""Allocation plans on CUDA: iterations that go by plan, and that do not."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_plans", globals())
