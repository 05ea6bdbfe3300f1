"""Builds torch_uvm._C against the torch that is installed.

Build with ``--no-build-isolation``: pip's isolated environment would fetch a torch of its own, and
the extension fits only the minor version of torch it was compiled against.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from setuptools import find_packages, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).resolve().parent

# The floors, bottom to top; each includes only what is below it (docs/design of RFC.md, "Floors").
FLOORS = ["runtime", "allocator", "residency", "tensor", "emulated", "python"]


def with_cuda_floor() -> bool:
    """Whether the CUDA floor is compiled in: a CUDA build of torch, and a toolkit to compile with."""
    from torch.utils.cpp_extension import CUDA_HOME

    return torch.version.cuda is not None and CUDA_HOME is not None


def extension() -> CppExtension:
    cuda = with_cuda_floor()
    floors = [*FLOORS, "cuda"] if cuda else FLOORS
    sources = sorted(
        str(path.relative_to(ROOT)) for floor in floors for path in (ROOT / "csrc" / floor).glob("*.cpp")
    )
    # NDEBUG: without it RecordFunction's inputs() asserts on every operator.
    flags = ["-std=c++20", "-O2", "-g1", "-DNDEBUG", "-Wall", "-Wextra", "-Wno-unused-parameter"]
    if cuda:
        flags.append("-DTORCH_UVM_WITH_CUDA")
    return (CUDAExtension if cuda else CppExtension)(
        name="torch_uvm._C",
        sources=sources,
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args={"cxx": flags} if cuda else flags,
        extra_link_args=["-g1"],
    )


os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))

setup(
    packages=find_packages(include=["torch_uvm", "torch_uvm.*"]),
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildExtension},
)
