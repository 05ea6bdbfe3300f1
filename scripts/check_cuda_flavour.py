"""Compiles and links the CUDA floor against CUDA builds of torch; needs neither CUDA nor a GPU.

    python scripts/check_cuda_flavour.py fetch           the wheels of requirements/cuda.txt, into build/
    python scripts/check_cuda_flavour.py build 2.11.0    compiles (-O0), links, accounts for every symbol

A wheel is fetched without what it depends on and only its headers and libraries are unpacked: enough to link,
not to run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "cuda-flavour"
PINNED = ROOT / "requirements" / "cuda.txt"
FLOORS = ["runtime", "allocator", "residency", "tensor", "emulated", "cuda", "python"]
# Where the symbols are that the extension may use.
LIBRARIES = ["c10", "c10_cuda", "torch_cpu", "torch_python"]


def pins() -> dict[str, list[str]]:
    """Versions by package."""
    found: dict[str, list[str]] = {}
    for package, version in re.findall(r"^([\w-]+)==(\S+)", PINNED.read_text(), re.MULTILINE):
        found.setdefault(package, []).append(version)
    return found


def unpacked(package: str, version: str) -> Path:
    return FOLDER / f"{package}-{version}"


def wanted(name: str) -> bool:
    libraries = [*(f"torch/lib/lib{library}.so" for library in LIBRARIES)]
    return "/include/" in name or name in libraries or re.search(r"/lib/libcudart\.so", name) is not None


def fetch() -> None:
    """What is unpacked already is not fetched again; nothing half unpacked is taken for whole."""
    for package, versions in pins().items():
        for version in versions:
            folder = unpacked(package, version)
            if folder.exists():
                continue
            wheels = FOLDER / "wheels"
            command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
            subprocess.run(
                [*command, "--quiet", "--no-deps", "--dest", wheels, f"{package}==={version}"], check=True
            )
            (wheel,) = wheels.glob("*.whl")
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(partial, [name for name in archive.namelist() if wanted(name)])
            partial.rename(folder)
            shutil.rmtree(wheels)
            print(f"{package} {version}", flush=True)


def torch_include(version: str) -> Path:
    return unpacked("torch", version) / "torch" / "include"


def cuda_folders() -> list[Path]:
    return [
        folder
        for package, versions in pins().items()
        if package.startswith("nvidia-")
        for folder in unpacked(package, versions[0]).glob("nvidia/*/")
    ]


def cudart() -> Path:
    return next(path for folder in cuda_folders() for path in folder.glob("lib/libcudart.so*"))


def ninja_file(version: str) -> str:
    include = torch_include(version)
    includes = [include, include / "torch" / "csrc" / "api" / "include"]
    includes += [folder / "include" for folder in cuda_folders()]
    includes.append(Path(sysconfig.get_path("include")))
    flags = (
        "-std=c++20 -O0 -fPIC -w -DNDEBUG -fvisibility=hidden -DTORCH_UVM_WITH_CUDA -DTORCH_EXTENSION_NAME=_C"
    )
    flags += " -DTORCH_API_INCLUDE_EXTENSION_H"
    search = f"-I{ROOT / 'csrc'} {' '.join(f'-isystem {path}' for path in includes)}"
    lines = [
        "rule cxx",
        f"  command = c++ -MMD -MF $out.d {flags} {search} -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
    ]
    objects = []
    for floor in FLOORS:
        for source in sorted((ROOT / "csrc" / floor).glob("*.cpp")):
            objects.append(f"{floor}/{source.stem}.o")
            lines.append(f"build {objects[-1]}: cxx {source}")
    return "\n".join([*lines, ""])


def unresolved(version: str, folder: Path) -> list[str]:
    """Links the extension; gives the symbols that nobody has. Python's own are the interpreter's."""
    libraries = torch_include(version).parent / "lib"
    command = ["c++", "-shared", *sorted(map(str, folder.glob("*/*.o"))), "-o", str(folder / "_C.so")]
    command += [f"-L{libraries}", *(f"-l{library}" for library in LIBRARIES), str(cudart())]
    command += ["-Wl,--unresolved-symbols=report-all", "-Wl,--warn-unresolved-symbols"]
    # What the libraries themselves need is not there, and not asked for.
    command += ["-Wl,--unresolved-symbols=ignore-in-shared-libs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr)
    found = set(re.findall(r"undefined reference to `(.+)'", done.stderr))
    return sorted(name for name in found if not re.match(r"_?Py", name))


def build(version: str) -> int:
    folder = FOLDER / f"build-{version}-{sys.implementation.cache_tag}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").write_text(ninja_file(version))
    jobs = os.environ.get("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if ninja is None:
        sys.exit("ninja is not there; it is pinned in requirements/build.txt")
    done = subprocess.run([ninja, "-C", folder, "-j", jobs, "--quiet"], check=False)
    if done.returncode != 0:
        return done.returncode
    lacking = unresolved(version, folder)
    for symbol in lacking:
        print(f"nobody has {symbol}")
    return 1 if lacking else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=["fetch", "build"])
    parser.add_argument("version", nargs="?")
    arguments = parser.parse_args()
    fetch()
    if arguments.command == "fetch":
        return 0
    known = pins()["torch"]
    if arguments.version not in known:
        parser.error(f"version {arguments.version}; accepted: {', '.join(known)}")
    return build(arguments.version)


if __name__ == "__main__":
    sys.exit(main())
