"""`enable(host_tensors=True)` beside a GPU."""

from _cuda_cases import run_on_cuda

run_on_cuda(
    "test_host_tensors",
    globals(),
    without={
        "TestSwitch::test_without_a_backend_it_is_refused": "a GPU always has a backend",
    },
)
