"""DLPack structures made by hand; imports of managed CUDA memory are in test_cuda_dlpack.py."""

from _cuda_cases import run_on_cuda

run_on_cuda(
    "test_dlpack_import",
    globals(),
    without={
        "TestImport": "imports host memory as managed memory, which only the emulator can use",
    },
)
