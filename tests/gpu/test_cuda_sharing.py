"""Managed CUDA tensors whose bytes PyTorch would replace."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_sharing", globals())
