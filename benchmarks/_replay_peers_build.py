"""Compiles the module that replays logs on our allocators and on PyTorch's and RMM's (cpp/replay_peers.cpp).

It contains the layers of torch_uvm that do not need torch.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from _results import ROOT

# The layers that a replay needs. None of them includes a torch header.
_LAYERS = ("runtime", "allocator", "config")
_CUDA = ("cuda_calls", "cuda_hints", "cuda_runtime")
_FLAGS = ("-std=c++20", "-O2", "-g1", "-DNDEBUG", "-fvisibility=hidden")  # the same flags as in setup.py
# Include by file, for the reason given in setup.py.
_LINK = ("-l:libstdc++.so.6",)


class NotHere(RuntimeError):
    """A required package or tool is missing. The message names it."""


def rmm_folders() -> list[Path]:
    """Finds the headers and libraries of the packages librmm and rapids_logger.

    Raises:
        NotHere: a package is not installed, or has a different layout.
    """
    folders = []
    for package, header, library in (
        ("librmm", "rmm/mr/pool_memory_resource.hpp", "librmm.so"),
        ("rapids_logger", "rapids_logger/logger.hpp", "librapids_logger.so"),
    ):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise NotHere(f"the package {package} is not installed (pip install librmm-cu13)")
        folder = Path(spec.origin).parent
        for file in (folder / "include" / header, folder / "lib64" / library):
            if not file.is_file():
                raise NotHere(f"{package} has no {file.relative_to(folder)}: RMM 26.10 has")
        folders.append(folder)
    return folders


def cuda_toolkit() -> str | None:
    """The toolkit's folder. torch would take the parent of nvcc's path, which may be a symbolic link
    elsewhere."""
    asked = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    beside_nvcc = str(Path(nvcc).resolve().parents[1]) if nvcc else None
    for folder in [asked] if asked else [beside_nvcc, "/usr/local/cuda"]:
        if folder and (Path(folder) / "include" / "cuda_runtime_api.h").is_file():
            return folder
    return None


def _sources(with_rmm: bool) -> list[Path]:
    csrc, cpp = ROOT / "csrc", ROOT / "benchmarks" / "cpp"
    found = [path for layer in _LAYERS for path in sorted((csrc / layer).rglob("*.cpp"))]
    found += [csrc / "cuda" / f"{name}.cpp" for name in _CUDA]
    return [*found, *(cpp / f"replay_{name}.cpp" for name in ("peers", "torch_native", *["rmm"] * with_rmm))]


def build() -> tuple[Any, str]:
    """Returns the module and the reason why RMM is missing, "" if it is present.

    Files that are compiled already are not compiled again.

    Raises:
        NotHere: there is no CUDA toolkit.
        OSError, RuntimeError: a compilation fails.
    """
    toolkit = cuda_toolkit()
    if toolkit is None:
        raise NotHere("there is no CUDA toolkit to compile against; CUDA_HOME says where it is")
    os.environ["CUDA_HOME"] = toolkit  # torch reads it during the following import
    from torch.utils import cpp_extension

    include = [ROOT / "csrc", ROOT / "benchmarks" / "cpp"]
    flags, link = [*_FLAGS], [*_LINK]
    try:
        rmm, logger = rmm_folders()
    except NotHere as reason:
        without = str(reason)
    else:
        without = ""
        include += [rmm / "include", rmm / "include" / "rapids", logger / "include"]
        flags.append("-DTORCH_UVM_WITH_RMM")
        # librmm finds rapids_logger only in its own folder, so we need its path too.
        link += ["-Wl,--no-as-needed"]
        for folder, library in ((rmm, "librmm.so"), (logger, "librapids_logger.so")):
            link += [f"-L{folder / 'lib64'}", f"-Wl,-rpath,{folder / 'lib64'}", f"-l:{library}"]
    name = f"replay-peers-{torch.__version__}-{sys.implementation.cache_tag}{'' if without else '-rmm'}"
    folder = ROOT / "build" / name
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    module = cpp_extension.load(
        name="torch_uvm_replay_peers",
        sources=[str(path) for path in _sources(not without)],
        extra_cflags=flags,
        extra_ldflags=link,
        extra_include_paths=[str(path) for path in include],
        build_directory=str(folder),
        with_cuda=True,
    )
    return module, without
