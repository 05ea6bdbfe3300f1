"""Managed CUDA tensors in calls that would make PyTorch replace their bytes."""

from _cuda_cases import run_on_cuda

run_on_cuda(
    "test_multiprocessing",
    globals(),
    without={
        "TestSending::test_plain_memory_on_a_device_has_no_handle_either": "CUDA has one, for others",
    },
)
