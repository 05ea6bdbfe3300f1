"""The switch on CUDA: process-wide, by scope, in backward threads."""

from _cuda_cases import run_on_cuda

run_on_cuda(
    "test_switch",
    globals(),
    without={
        "TestLimitOfEnable": "sets limits that a real GPU is not given; says nothing of the accelerator",
    },
)
