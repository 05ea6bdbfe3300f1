"""DLPack and numpy with managed CUDA tensors."""

from _cuda_cases import run_on_cuda

run_on_cuda(
    "test_dlpack",
    globals(),
    without={
        "TestImport": "imports host memory as managed memory, which only the emulator can use",
        "TestBadImports::test_a_refused_capsule_is_as_it_was": "the same",
    },
)
