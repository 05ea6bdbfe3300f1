"""Compiles and links the CUDA flavour against CUDA builds of torch; needs neither CUDA nor a GPU.

    python scripts/check_cuda_flavour.py fetch           the wheels of requirements/cuda.txt, into build/
    python scripts/check_cuda_flavour.py headers         CUDA's headers alone; prints the folder
    python scripts/check_cuda_flavour.py build 2.11.0    compiles (-O0), links, accounts for every symbol

Wheels are fetched without their dependencies. CUDA's other libraries, such as cuBLAS, are 2 GB and are not
needed for computing here. Stand-ins with their names let this torch be imported over the fake CUDA runtime
(tests/fake_cuda), and torch_uvm with it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import unity

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "cuda-flavour"
PINNED = ROOT / "requirements" / "cuda.txt"
DOUBLES = ROOT / "tests" / "cpp" / "doubles"  # what only tests use
PYTHON = sys.implementation.cache_tag
# The layers that do not depend on torch: compiled once for all versions.
BELOW_TORCH = ["runtime", "allocator", "config", "residency"]
COMPILER = os.environ.get("CXX", "c++").split()  # which may be "ccache c++"
# The libraries that must define every symbol that the extension uses.
LIBRARIES = ["c10", "c10_cuda", "torch_cpu", "torch_cuda", "torch_python"]
FLAGS = (
    "-std=c++20 -O0 -fPIC -w -DNDEBUG -fvisibility=hidden -DTORCH_UVM_WITH_CUDA -DTORCH_EXTENSION_NAME=_C "
    "-DTORCH_API_INCLUDE_EXTENSION_H"
).split()
# CUDA's libraries besides its runtime, and the symbols of them that torch uses.
ABSENT_LIBRARY = re.compile(r"lib(?:cu(?!dart|da\.)|nv|nccl)\w*\.so\S*")
ABSENT_SYMBOL = re.compile(
    r"(?:cublas|cudnn|cufft|cuFile|cupti|curand|cusolver|cusparse|nccl|nvrtc|nvshmem)\w*"
)
# The profiler of torch 2.11 reads the text of an error, whether or not it could be had.
ERROR_NAME = """
extern "C" int cuptiGetResultString(int, const char** text) { *text = "CUPTI is absent"; return 0; }
"""


class Failed(RuntimeError):
    """A check or a step failed. The message is for the user."""


def pins() -> dict[str, dict[str, str]]:
    """Maps package and version to the size of its download."""
    found: dict[str, dict[str, str]] = {}
    for package, version, size in re.findall(
        r"^([\w-]+)==(\S+)\s+#\s*(.+)$", PINNED.read_text(), re.MULTILINE
    ):
        found.setdefault(package, {})[version] = size
    return found


def versions() -> list[str]:
    return list(pins()["torch"])


def torch_folder(version: str) -> Path:
    return FOLDER / f"torch-{version}-{PYTHON}"


def torch_include(version: str) -> Path:
    return torch_folder(version) / "torch" / "include"


def cuda_folder() -> Path:
    """The headers and the runtime library of CUDA, in the layout of its wheels."""
    return FOLDER / "-".join(["cuda", *(version for name in cuda_packages() for version in pins()[name])])


def cuda_packages() -> list[str]:
    return [name for name in pins() if name.startswith("nvidia-")]


def cuda_headers() -> Path:
    (header,) = cuda_folder().glob("nvidia/*/include/cuda_runtime_api.h")
    return header.parent


def cudart() -> Path:
    (library,) = cuda_folder().glob("nvidia/*/lib/libcudart.so*")
    return library


def output_of(command: Iterable[str | Path]) -> str:
    done = subprocess.run([*command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"{' '.join(map(str, command))[:300]}\n{done.stdout[-4000:]}{done.stderr[-8000:]}")
    return done.stdout


# --- downloads


def wanted(name: str) -> bool:
    return not re.search(r"\.a$|/libtorch_cuda_linalg\.so$|^torch/(?:test|share)/", name)


def unpack(folder: Path, requirements: list[str]) -> None:
    """Unpacks into a temporary folder and renames it at the end, so that an interrupted run leaves no partial
    result."""
    wheels, partial = folder.with_suffix(".wheels"), folder.with_suffix(".partial")
    for left in (wheels, partial):
        shutil.rmtree(left, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["download", "--quiet", "--no-deps", "--only-binary=:all:"]
    try:
        output_of([*command, "--dest", str(wheels), *requirements])
    except Failed as error:
        raise Failed(
            f"{error}\npip cannot get {', '.join(requirements)}; TORCH_UVM_TEST_CUDA=0 leaves the "
            "check of the CUDA flavour out"
        ) from None
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial, [name for name in archive.namelist() if wanted(name)])
    shutil.rmtree(wheels)
    for program in partial.glob("torch/bin/*"):
        program.chmod(0o755)  # zipfile drops the mode
    partial.rename(folder)


def fetch(with_torch: bool = True) -> None:
    """Fetches the wheels that are not unpacked yet."""
    found = pins()
    wanted_folders = {cuda_folder(): [f"{name}==={v}" for name in cuda_packages() for v in found[name]]}
    if with_torch:
        wanted_folders |= {torch_folder(version): [f"torch==={version}"] for version in found["torch"]}
        for old in set(FOLDER.glob("torch-*")) | set(FOLDER.glob("cuda-*")):
            if old not in wanted_folders:
                shutil.rmtree(old)
    missing = {folder: what for folder, what in wanted_folders.items() if not folder.exists()}
    if not missing:
        return
    print("pip now downloads, from where it is configured to, for checks of CUDA:", file=sys.stderr)
    for requirement in (each for what in missing.values() for each in what):
        name, version = requirement.split("===")
        print(f"  {name + '==' + version:24} {found[name][version]}", file=sys.stderr, flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(unpack, missing.keys(), missing.values()))
    for version in found["torch"] if with_torch else []:
        if not (torch_folder(version) / "torch" / "lib" / "libtorch_cuda.so").exists():
            shutil.rmtree(torch_folder(version))
            raise Failed(f"the torch {version} that pip got has no CUDA: another index is needed")


# --- compiling


def batches(layers: Iterable[str]) -> list[list[Path]]:
    """Groups of files that are compiled jointly. Reading torch's headers takes most of the time, so the files
    of a layer go together. Files of csrc/cuda are compiled separately, because no other build without CUDA
    compiles them."""
    found: list[list[Path]] = []
    for layer in layers:
        files = sorted((ROOT / "csrc" / layer).rglob("*.cpp"))
        found += [[file] for file in files] if layer == "cuda" else unity.groups(files)
    return sorted(found, key=len, reverse=True)


def compile_together(files: list[Path], flags: list[str], folder: Path) -> list[Path]:
    """Compiles files jointly. If that fails, compiles them in parts."""
    stem = folder / f"{files[0].parent.name}-{files[0].stem}-{len(files)}"
    source, result = unity.write(stem.with_suffix(".cpp"), files), stem.with_suffix(".o")
    try:
        output_of([*COMPILER, *flags, "-c", str(source), "-o", str(result)])
    except Failed as error:
        if len(files) == 1:
            raise
        apart = [file for file in files if f"{file}:" in str(error) and file != files[0]] or files[1:]
        rest = [file for file in files if file not in apart]
        return [each for part in (rest, apart) for each in compile_together(part, flags, folder)]
    return [result]


def compile_batches(
    batches: Iterable[list[Path]], include: Iterable[Path], folder: Path, flags: Iterable[str] = FLAGS
) -> list[Path]:
    """Compiles groups of files, each jointly. Returns the object files. Paths in them are relative."""
    flags = [*flags, f"-I{ROOT / 'csrc'}", f"-I{DOUBLES.parent}", *(f"-isystem{path}" for path in include)]
    # The compiler takes the last one that fits: headers are named by their path below `include`.
    flags += [f"-ffile-prefix-map={path}=." for path in (ROOT, *include)]
    jobs = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(jobs) as pool:
        parts = [pool.submit(compile_together, files, flags, folder) for files in batches]
        return [each for part in parts for each in part.result()]


def link(version: str, objects: list[Path], target: Path) -> None:
    """Links, and checks that every symbol is defined somewhere. Symbols of Python come from the interpreter.
    Dependencies of the libraries themselves are absent, and are not checked."""
    libraries = torch_include(version).parent / "lib"
    command = [*COMPILER, "-shared", *map(str, objects), "-o", str(target), f"-L{libraries}"]
    command.append("-Wl,--no-as-needed")  # also libraries that only weak symbols need
    command += [*(f"-l{library}" for library in LIBRARIES), str(cudart()), "-l:libstdc++.so.6"]
    command += ["-Wl,--warn-unresolved-symbols", "-Wl,--unresolved-symbols=ignore-in-shared-libs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(done.stderr)
    undefined = re.findall(r"undefined reference to `(.+)'", done.stderr)
    lacking = {name for name in undefined if not re.match(r"_?Py", name)}
    if version == versions()[-1]:
        # The linker does not report weak symbols. The newest torch defines each of them, possibly with other
        # arguments.
        weak = re.findall(r"^ +w (at::\S+?)\(", output_of(["nm", "-DC", target]), re.MULTILINE)
        there = output_of(["nm", "-DC", "--defined-only", libraries / "libtorch_cuda.so"])
        lacking |= {name for name in weak if f" {name}(" not in there}
    if lacking:
        raise Failed("\n".join(f"no file has {name}" for name in sorted(lacking)))


def fingerprint(layers: Iterable[str], version: str = "") -> str:
    """A hash of all inputs of these layers."""
    files = [Path(__file__), PINNED, *sorted(DOUBLES.iterdir())]
    for layer in layers:
        files += sorted(path for path in (ROOT / "csrc" / layer).rglob("*") if path.is_file())
    text = version.encode() + b"".join(str(path).encode() + path.read_bytes() for path in files)
    return hashlib.sha256(text).hexdigest()


def build_folder(version: str) -> Path:
    return FOLDER / f"build-{version}-{PYTHON}"


def is_made(folder: Path, made_from: str) -> bool:
    """Whether the folder is up to date. If not, empties it."""
    stamp = folder / "stamp"
    if stamp.exists() and stamp.read_text() == made_from:
        return True
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return False


def objects_below_torch() -> list[Path]:
    folder, made_from = FOLDER / "below-torch", fingerprint(BELOW_TORCH)
    if not is_made(folder, made_from):
        compile_batches(batches(BELOW_TORCH), [], folder)
        (folder / "stamp").write_text(made_from)
    return sorted(folder.glob("*.o"))


def build(version: str) -> None:
    folder = build_folder(version)
    target = folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    layers = sorted(path.name for path in (ROOT / "csrc").iterdir() if path.is_dir())
    made_from = fingerprint(layers, version)
    if not is_made(folder, made_from):
        include = torch_include(version)
        system = [include, include / "torch" / "csrc" / "api" / "include", cuda_headers()]
        system.append(Path(sysconfig.get_path("include")))
        below = objects_below_torch()
        above = batches(each for each in layers if each not in BELOW_TORCH)
        doubles = [[file] for file in sorted(DOUBLES.glob("*.cpp"))]
        objects = compile_batches([*above, *doubles], system, folder)
        link(version, below + objects, target)
        make_stand_ins(torch_folder(version) / "torch" / "lib", folder / "lib")
        (folder / "stamp").write_text(made_from)
    assemble(version, target)


# --- running it


def make_stand_ins(libraries: Path, folder: Path) -> None:
    """Fills `folder`, which must not exist, for the torch whose libraries these are."""
    folder.mkdir()
    there = sorted(libraries.glob("lib*.so"))
    needed = set(re.findall(r"\(NEEDED\)[^\[]*\[(.+)\]", output_of(["readelf", "-d", *there])))
    compiler = [*COMPILER, "-shared", "-fPIC", "-w", "-x", "c++"]
    nothing = folder / "nothing.cpp"
    nothing.write_text("")
    for name in sorted(filter(ABSENT_LIBRARY.fullmatch, needed)):
        output_of([*compiler, nothing, "-o", str(folder / name), f"-Wl,-soname,{name}"])
    undefined = output_of(["nm", "-D", "--undefined-only", *there])
    symbols = set(re.findall(r"^ +[Uw] (\w+)", undefined, re.MULTILINE))
    source = folder / "absent.cpp"
    absent = sorted(filter(ABSENT_SYMBOL.fullmatch, symbols - {"cuptiGetResultString"}))
    source.write_text("".join(f'extern "C" int {name}() {{ return 1; }}\n' for name in absent) + ERROR_NAME)
    output_of([*compiler, str(source), "-o", str(folder / "libabsent.so")])


def assemble(version: str, extension: Path) -> None:
    """A folder with torch_uvm's Python files and this extension."""
    site = build_folder(version) / "site"
    shutil.rmtree(site, ignore_errors=True)
    (site / "torch_uvm").mkdir(parents=True)
    (site / "torch_uvm_autoload.py").symlink_to(ROOT / "torch_uvm_autoload.py")
    for path in (ROOT / "torch_uvm").iterdir():
        if path.name not in ("_native", "__pycache__"):
            (site / "torch_uvm" / path.name).symlink_to(path)
    major, minor = version.split(".")[:2]
    native = site / "torch_uvm" / "_native" / f"torch_{major}_{minor}_cu13"  # torch_uvm/_util/native.py
    native.mkdir(parents=True)
    (native / extension.name).symlink_to(extension)


def environment(version: str, fake_cuda: Path) -> dict[str, str]:
    """The environment in which this interpreter imports that torch, and torch_uvm built for it, over the fake
    runtime."""
    folder = build_folder(version)
    return {
        "LD_PRELOAD": f"{fake_cuda}:{folder / 'lib' / 'libabsent.so'}",
        "LD_LIBRARY_PATH": f"{folder / 'lib'}:{cudart().parent}",
        "PYTHONPATH": f"{folder / 'site'}:{torch_folder(version)}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=["fetch", "headers", "build"])
    parser.add_argument("version", nargs="?")
    arguments = parser.parse_args()
    if arguments.command == "build" and arguments.version not in versions():
        parser.error(f"version {arguments.version}; accepted: {', '.join(versions())}")
    try:
        fetch(with_torch=arguments.command != "headers")
        if arguments.command == "headers":
            print(cuda_headers())
        if arguments.command == "build":
            build(arguments.version)
    except Failed as error:
        sys.exit(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
