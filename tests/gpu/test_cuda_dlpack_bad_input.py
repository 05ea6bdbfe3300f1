"""DLPack imports and exports that are refused, with managed CUDA tensors."""

from _cuda_cases import run_on_cuda

run_on_cuda(
    "test_dlpack_bad_input",
    globals(),
    without={
        "TestBadImports::test_a_refused_capsule_is_unchanged": (
            "imports host memory as managed memory, which only the emulator can use"
        ),
    },
)
