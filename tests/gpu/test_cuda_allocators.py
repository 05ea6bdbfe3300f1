"""Tensors of allocators besides the default one, on CUDA: scopes, nesting, idle memory, the document."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_allocators", globals())
