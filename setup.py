"""Builds torch_uvm._C against the torch that is installed; the metadata is in pyproject.toml.

Build with ``--no-build-isolation``: pip's isolated environment would fetch a torch of its own, and the
extension fits only the minor version of torch it was compiled against. Its folder has that version in its
name (torch_uvm/_util/native.py).

With a CUDA build of torch, CUDA's headers and runtime library are needed: from a toolkit, from conda, or
from the packages of PyPI that this torch brings. ``CUDA_HOME`` says where they are. ``TORCH_UVM_CUDA=0``
builds the emulator alone; ``TORCH_UVM_CUDA=1`` fails where torch has no CUDA, too. ``MAX_JOBS`` bounds the
compilers at work at once. ``python setup.py flavour`` says what would be built, and builds nothing.
``TORCH_UVM_CHECKED=1`` builds one that walks its structures after every change
(csrc/allocator/invariants.h). ``TORCH_UVM_TEST_BINDINGS=1`` compiles in the test doubles and their bindings,
which the tests need and wheels lack; ``make`` sets it. ``TORCH_UVM_UNITY=0`` compiles each file by itself;
otherwise files are compiled in groups (scripts/unity.py). ``TORCH_UVM_SANITIZE=address`` and ``=thread``
build one under AddressSanitizer and ThreadSanitizer; Python has to be started as tests/_sanitized.py does it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Command, Extension, setup

# An installed torch_uvm is loaded by `import torch` through its entry point; one that is broken or was
# built against another torch must not stand in the way of building it anew.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


import torch
from torch.utils.cpp_extension import BuildExtension, CppExtension


def cuda_files(torch_cuda: str) -> tuple[Path, Path] | None:
    """The folder of CUDA's headers, and CUDA's runtime library, both of the major version of `torch_cuda`.

    They lie together in a toolkit, below ``targets`` in conda's, and in the packages ``nvidia-*`` of PyPI.
    """
    asked = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    major = torch_cuda.split(".")[0]
    folders = [Path(asked)] if asked else [Path(nvcc).resolve().parents[1]] if nvcc else []
    if not asked:
        packages = Path(torch.__file__).parents[1]
        folders += [Path("/usr/local/cuda"), Path(sys.prefix), packages / "nvidia" / f"cu{major}"]
    for folder in folders:
        for place in (folder, *sorted(folder.glob("targets/*-linux"))):
            libraries = [*place.glob(f"lib*/libcudart.so.{major}*")]
            headers = [place / "include" / name for name in ("cuda_runtime_api.h", "crt/host_defines.h")]
            if libraries and all(path.is_file() for path in headers):
                return place / "include", min(libraries)
    return None


ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))

import unity

OLDEST_TORCH = (2, 11)

# The layers, bottom to top; each includes only what is below it (CONTRIBUTING.md, "Layers").
LAYERS = ["runtime", "allocator", "config", "residency", "tensor", "emulated", "python"]

# How many files are compiled jointly. An edit compiles one group again, so a group takes some ten seconds.
# Layers below `tensor` include no header of torch, and compile faster.
GROUP = 6
GROUP_BELOW_TORCH = 12

# What only tests use: calls that fail on demand, and bindings.
TEST_SOURCES = ["tests/cpp/doubles/failing_calls.cpp", "tests/cpp/doubles/test_bindings.cpp"]


def torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def cuda_layer() -> tuple[Path, Path] | None:
    """What `cuda_files` found, if the CUDA layer is compiled in."""
    asked = os.environ.get("TORCH_UVM_CUDA", "")
    if asked not in ("", "0", "1"):
        sys.exit(f"TORCH_UVM_CUDA is {asked!r}; accepted are 0 (no CUDA layer), 1 (require it) and unset")
    if asked == "1" and torch.version.cuda is None:
        sys.exit("TORCH_UVM_CUDA=1 asks for the CUDA layer, but this torch has no CUDA")
    if asked == "0" or torch.version.cuda is None:
        return None
    found = cuda_files(torch.version.cuda)
    if found is None:
        major = torch.version.cuda.split(".")[0]
        sys.exit(
            f"this torch is for CUDA {torch.version.cuda}, and no headers and runtime library of CUDA "
            f"{major} were found: install CUDA's toolkit, or `pip install nvidia-cuda-runtime=={major}.* "
            f"nvidia-cuda-crt=={major}.*`, or set CUDA_HOME; TORCH_UVM_CUDA=0 builds the emulator alone, "
            "which uses no GPU"
        )
    return found


def is_asked_for(variable: str, otherwise: bool = False) -> bool:
    asked = os.environ.get(variable, "")
    if asked not in ("", "0", "1"):
        sys.exit(f"{variable} is {asked!r}; accepted are 0, 1 and unset")
    return asked == "1" if asked else otherwise


def is_checked() -> bool:
    return is_asked_for("TORCH_UVM_CHECKED")


def has_test_bindings() -> bool:
    return is_asked_for("TORCH_UVM_TEST_BINDINGS")


def sanitizer() -> str | None:
    asked = os.environ.get("TORCH_UVM_SANITIZE", "")
    if asked not in ("", "address", "thread"):
        sys.exit(f"TORCH_UVM_SANITIZE is {asked!r}; accepted are address, thread and unset")
    return asked or None


def flavour() -> str:
    """What is built, in one line."""
    cuda = cuda_layer()
    what = "the emulated runtime only" if cuda is None else "the emulated runtime and the CUDA layer"
    reason = f"CUDA {torch.version.cuda}, headers in {cuda[0]}" if cuda else "TORCH_UVM_CUDA=0"
    reason = "this torch has no CUDA" if torch.version.cuda is None else reason
    checked = ", invariants checked" if is_checked() else ""
    tests = ", test bindings" if has_test_bindings() else ""
    sanitized = f", under the {sanitizer()} sanitizer" if sanitizer() else ""
    return f"torch_uvm for torch {torch.__version__}: {what} ({reason}){tests}{checked}{sanitized}"


def extension() -> Extension:
    cuda = cuda_layer()
    layers = LAYERS if cuda is None else [*LAYERS, "cuda"]

    def files(pattern: str) -> list[str]:
        paths = (path for layer in layers for path in (ROOT / "csrc" / layer).rglob(pattern))
        return sorted(path.relative_to(ROOT).as_posix() for path in paths)

    # NDEBUG: without it RecordFunction's inputs() asserts on every operator.
    flags = ["-std=c++20", "-O2", "-g1", "-DNDEBUG", "-fvisibility=hidden"]
    flags += ["-Wall", "-Wextra", "-Wno-unused-parameter"]
    if is_checked():
        flags.append("-DTORCH_UVM_CHECKED")
    # By its file: some tool chains have the static library only, and a second copy of it in the
    # process breaks what crosses to torch's (seen: streams that read nothing, exceptions that crash).
    link_flags = ["-l:libstdc++.so.6"]
    include = [str(ROOT / "csrc"), *([str(ROOT / "tests" / "cpp")] if has_test_bindings() else [])]
    if cuda is not None:
        flags.append("-DTORCH_UVM_WITH_CUDA")
        include.append(str(cuda[0]))
        link_flags.append(str(cuda[1]))
    if kind := sanitizer():
        # -O1: stacks have a frame for most functions, and the compiler takes half the time.
        flags += [f"-fsanitize={kind}", "-O1", "-fno-omit-frame-pointer", "-DTORCH_UVM_SANITIZED"]
        link_flags.append(f"-fsanitize={kind}")
    if not torch.distributed.is_available():
        flags.append("-DTORCH_UVM_WITHOUT_DISTRIBUTED")
    # Beside those of wheels, under the name that torch_uvm/_util/native.py looks for.
    major, minor = torch_version()
    kind = "cpu" if cuda is None else f"cu{str(torch.version.cuda).split('.')[0]}"
    return CppExtension(
        name=f"torch_uvm._native.torch_{major}_{minor}_{kind}._C",
        sources=files("*.cpp") + (TEST_SOURCES if has_test_bindings() else []),
        depends=files("*.h"),
        include_dirs=include,
        libraries=[] if cuda is None else ["c10_cuda", "torch_cuda"],
        extra_compile_args=flags,
        extra_link_args=link_flags,
    )


def joint_sources(sources: list[str], folder: Path) -> list[str]:
    """Files in `folder` that include the sources in groups of one layer. Test doubles are apart."""
    made = [path for path in sources if path in TEST_SOURCES]
    for layer in sorted({path.split("/")[1] for path in sources if path not in TEST_SOURCES}):
        most = GROUP if layer in LAYERS[LAYERS.index("tensor") :] + ["cuda"] else GROUP_BELOW_TORCH
        files = [ROOT / path for path in sources if path.startswith(f"csrc/{layer}/")]
        for index, group in enumerate(unity.groups(files, most)):
            members = [path.relative_to(ROOT / "csrc").as_posix() for path in group]
            target = unity.write(folder / f"{layer}-{index}.cpp", members)
            made.append(target.relative_to(ROOT).as_posix())
    return made


class BuildExt(BuildExtension):
    """Keeps its object files: an editable install gets a temporary build folder, so that without this
    every build would compile everything. Ninja knows from there what has changed, headers included."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # One folder for each torch, Python and flavour: what is compiled for one does not fit another.
        layer = ("emulated" if cuda_layer() is None else "cuda") + ("-checked" if is_checked() else "")
        layer += f"-{sanitizer()}" if sanitizer() else ""
        build = f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{layer}"
        self.build_temp = str(ROOT / "build" / build)

    def run(self) -> None:
        print(flavour(), flush=True)
        for ext in self.extensions if self.inplace else []:
            (ROOT / ext.name.replace(".", "/")).parent.mkdir(parents=True, exist_ok=True)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        if is_asked_for("TORCH_UVM_UNITY", otherwise=True):
            ext.sources = joint_sources(ext.sources, Path(self.build_temp) / "unity")
        super().build_extension(ext)


class Flavour(Command):
    description = "say what would be built"
    user_options: list[tuple[str, str | None, str]] = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        print(flavour())


def readme() -> str:
    """README.md for an index of packages, which has none of the files that it links to."""
    return re.sub(r"\[([^]]+)\]\((?!https?:)[^)]*\)", r"\1", (ROOT / "README.md").read_text())


if torch_version() < OLDEST_TORCH:
    oldest = ".".join(map(str, OLDEST_TORCH))
    sys.exit(f"torch_uvm needs torch {oldest} or newer; this is torch {torch.__version__}")
os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))

setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildExt, "flavour": Flavour},
)
