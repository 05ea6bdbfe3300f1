"""`enable(host_tensors=True)` beside a GPU."""

from _cuda_cases import run_on_cuda

run_on_cuda("test_host_tensors", globals())
