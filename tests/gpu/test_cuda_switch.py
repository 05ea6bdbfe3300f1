"""The switch on CUDA: process-wide, by scope, in backward threads."""

from _cases import run_on_cuda

run_on_cuda(
    "test_switch",
    globals(),
    without={
        "TestLimitOfEnable": "sets limits that are not allowed on a real GPU; says nothing of the accelerator",
    },
)
