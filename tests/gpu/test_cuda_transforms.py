"""Moves under the transforms of torch.func, on CUDA."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_transforms", globals())
