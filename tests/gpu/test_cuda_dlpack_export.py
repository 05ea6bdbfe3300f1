"""DLPack and numpy with managed CUDA tensors."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_dlpack", globals())
