"""Exit and fork with managed CUDA tensors alive. test_cuda_processes.py tests what a child is refused."""

from _cuda_cases import run_on_cuda

run_on_cuda(
    "test_fork_and_exit",
    globals(),
    without={
        "TestFork::test_child_is_refused_the_devices_bytes_by_name": "refused in CUDA's words",
        "TestFork::test_child_allocates_ordinary_memory_on_the_host_only": "the same",
        "TestFork::test_child_makes_views_of_device_tensors": "PyTorch asks CUDA for the device first",
        "TestDataLoader::test_dataset_under_the_devices_label_fails_by_name": "the same",
    },
)
