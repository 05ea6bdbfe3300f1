"""Builds one wheel that holds an extension for each minor version of torch, for CPU and for CUDA 13.

    python scripts/wheels.py dist                    all versions of requirements/wheels.txt
    python scripts/wheels.py dist 2.11.0 2.13.0      these
    python scripts/wheels.py --test dist 2.13.0      with the test doubles; for tests, not to be published

The wheel is for the Python that runs this. Layers below torch are compiled once. The others are compiled once
for each torch, against the headers of its CUDA build, and csrc/python for each Python, too. Only what
csrc/cuda and the macro TORCH_UVM_WITH_CUDA make differs between the flavours. The extensions lie in
torch_uvm/_native (torch_uvm/_util/native.py).

auditwheel checks that the wheel runs with glibc 2.28 and libstdc++ of GCC 8. Newer compilers need three
things for that: scripts/glibc_2_28.cpp, older versions of some functions of glibc, members of libstdc++.a.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

import check_cuda_flavour as flavour
import packages
import unity

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "wheels"
PINNED = ROOT / "requirements" / "wheels.txt"
PLATFORM = "manylinux_2_28_x86_64"
FLAGS = (
    "-std=c++20 -O2 -fwrapv -fPIC -w -DNDEBUG -fvisibility=hidden -DTORCH_EXTENSION_NAME=_C "
    "-DTORCH_API_INCLUDE_EXTENSION_H"
).split()
WITHOUT_PYTHON = ["tensor", "emulated"]
PYTHON_HEADERS = Path(sysconfig.get_path("include"))
# These files test TORCH_UVM_WITH_CUDA, and are compiled for each flavour.
BY_FLAVOUR = [ROOT / "csrc" / "python" / "tensor.cpp"]
FLAVOURS = {
    "cpu": ["c10", "torch_cpu", "torch_python"],
    "cu13": ["c10", "c10_cuda", "torch_cpu", "torch_cuda", "torch_python"],
}
# In glibc since 2.2.5; 2.34 gave them another version.
OLD_GLIBC = ["pthread_getspecific", "pthread_key_create", "pthread_key_delete", "pthread_mutex_trylock"]
OLD_GLIBC += ["pthread_once", "pthread_rwlock_rdlock", "pthread_rwlock_unlock", "pthread_rwlock_wrlock"]
OLD_GLIBC += ["pthread_setspecific"]
# The parts of libstdc++ newer than GCC 8 that the layers use. No other part is linked statically: two copies
# of libstdc++ in one process break what crosses to torch's.
NEW_LIBSTDCXX = ["condition_variable", "floating_from_chars", "floating_to_chars", "futex", "memory_resource"]


def versions() -> list[str]:
    return re.findall(r"^torch==(\S+)", PINNED.read_text(), re.MULTILINE)


def native_name(version: str, kind: str) -> str:
    """The folder of an extension, which torch_uvm/_util/native.py looks for."""
    major, minor = version.split(".")[:2]
    return f"torch_{major}_{minor}_{kind}"


def torch_folder(version: str) -> Path:
    """Where the torch is unpacked. Downloads it if it is not there."""
    folder = flavour.torch_folder(version)
    if not folder.exists():
        folder = FOLDER / folder.name
    if not folder.exists():
        print(f"pip now downloads torch=={version}, from where it is configured to", flush=True)
        FOLDER.mkdir(parents=True, exist_ok=True)
        flavour.unpack(folder, [f"torch==={version}"])
    if not (folder / "torch" / "lib" / "libtorch_cuda.so").exists():
        raise flavour.Failed(f"the torch {version} that pip got has no CUDA: another index is needed")
    return folder


# --- compiling


def sources(layers: Iterable[str]) -> list[Path]:
    found = (path for layer in layers for path in sorted((ROOT / "csrc" / layer).rglob("*.cpp")))
    return [path for path in found if path not in BY_FLAVOUR]


def by_layer(files: Iterable[Path]) -> list[list[Path]]:
    layers: dict[str, list[Path]] = {}
    for file in files:
        layers.setdefault(file.relative_to(ROOT).parts[1], []).append(file)
    return [group for files in layers.values() for group in unity.groups(files, 24)]


def objects(
    name: str, version: str, files: list[Path], include: list[Path], extra: Iterable[str] = ()
) -> list[Path]:
    """The object files of these sources, compiled unless they are up to date. Without Python's headers in
    `include` they are for every Python."""
    python = f"-{flavour.PYTHON}" if PYTHON_HEADERS in include else ""
    folder = FOLDER / "objects" / f"{version}{python}" / name
    layers = sorted(path.name for path in (ROOT / "csrc").iterdir() if path.is_dir())
    reads = flavour.BELOW_TORCH if version == "core" else layers  # all headers that they may include
    made_from = flavour.fingerprint(reads, version + " ".join([*FLAGS, *extra]))
    if not flavour.is_made(folder, made_from):
        begin = time.perf_counter()
        flavour.compile_batches(by_layer(files), include, folder, [*FLAGS, *extra])
        (folder / "stamp").write_text(made_from)
        print(f"  {name}: {time.perf_counter() - begin:.0f} s", flush=True)
    return sorted(folder.glob("*.o"))


def older_systems() -> list[str]:
    """Arguments for the linker, before the libraries: what makes the result run with glibc 2.28 and GCC 8's
    libstdc++."""
    folder = FOLDER / "older"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run = flavour.output_of
    code, stub, script = folder / "glibc.o", folder / "libpthread.so.0", folder / "versions"
    run(["c++", *FLAGS, "-c", str(ROOT / "scripts" / "glibc_2_28.cpp"), "-o", code])
    script.write_text(f"GLIBC_2.2.5 {{ global: {'; '.join(OLD_GLIBC)}; local: *; }};\n")
    (folder / "stub.c").write_text("".join(f"void {name}(void) {{}}\n" for name in OLD_GLIBC))
    command = ["gcc", "-shared", "-fPIC", "-nostdlib", "-fno-builtin", f"{folder}/stub.c", "-o", str(stub)]
    run([*command, f"-Wl,-soname,{stub.name}", f"-Wl,--version-script={script}"])
    archive = run(["c++", "-print-file-name=libstdc++.a"]).strip()
    members = [f"{name}.o" for name in NEW_LIBSTDCXX]
    run(["ar", "x", archive, *members, "--output", folder])
    run(["ar", "rcs", folder / "libnew.a", code, *(folder / member for member in members)])
    return [str(folder / "libnew.a"), "-Wl,--exclude-libs,libnew.a", str(stub)]


def link(version: str, kind: str, parts: list[Path], target: Path) -> None:
    """Links an extension, stripped. Every symbol must be defined in a library of this torch, or by Python."""
    libraries = torch_folder(version) / "torch" / "lib"
    command = ["c++", "-shared", "-s", *map(str, parts), "-o", str(target), *older_systems()]
    command += [f"-L{libraries}", "-Wl,--no-as-needed", *(f"-l{each}" for each in FLAVOURS[kind])]
    command += [str(flavour.cudart())] if kind != "cpu" else []
    command += ["-l:libstdc++.so.6", "-Wl,--warn-unresolved-symbols"]
    command += ["-Wl,--unresolved-symbols=ignore-in-shared-libs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise flavour.Failed(done.stderr)
    undefined = set(re.findall(r"undefined reference to `(.+)'", done.stderr))
    if lacking := sorted(name for name in undefined if not re.match(r"_?Py", name)):
        raise flavour.Failed("\n".join(f"torch {version}, {kind}: no file has {name}" for name in lacking))


def build(version: str, native: Path, test: bool) -> None:
    """Compiles and links both flavours of a version into their folders below `native`."""
    print(f"torch {version}", flush=True)
    include = torch_folder(version) / "torch" / "include"
    system = [include, include / "torch" / "csrc" / "api" / "include", flavour.cuda_headers()]
    common = objects("core", "core", sources(flavour.BELOW_TORCH), [])
    common += objects("torch", version, sources(WITHOUT_PYTHON), system)
    cuda = objects("cuda", version, sources(["cuda"]), system, ["-DTORCH_UVM_WITH_CUDA"])
    system.append(PYTHON_HEADERS)
    common += objects("python", version, sources(["python"]), system)
    if test:
        common += objects("doubles", version, sorted(flavour.DOUBLES.glob("*.cpp")), system)
    for kind in FLAVOURS:
        macros = [] if kind == "cpu" else ["-DTORCH_UVM_WITH_CUDA"]
        parts = common + objects(kind, version, BY_FLAVOUR, system, macros) + (cuda if macros else [])
        target = native / native_name(version, kind) / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
        target.parent.mkdir(parents=True)
        link(version, kind, parts, target)
        print(f"  {target.parent.name}: {target.stat().st_size / 1e6:.1f} MB", flush=True)


# --- packing


def provenance(built: list[str], test: bool) -> dict[str, object]:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return {
        "commit": git("rev-parse", "HEAD") or None,
        "changed_files": git("status", "--porcelain").splitlines(),
        "compiler": flavour.output_of(["c++", "--version"]).splitlines()[0],
        "flags": FLAGS,
        "python": sys.version.split()[0],
        "torch": built,
        "cuda": dict(item for name in flavour.cuda_packages() for item in [(name, [*flavour.pins()[name]])]),
        "test_doubles": test,
    }


def pack(native: Path, built: list[str], test: bool, folder: Path) -> Path:
    """Packs the extensions and the files that git tracks. Returns the wheel, not yet audited. The same files
    make the same bytes: the time of each file is that of the commit."""
    committed = flavour.output_of(["git", "-C", ROOT, "log", "-1", "--format=%ct"]).strip()
    os.environ.setdefault("SOURCE_DATE_EPOCH", committed)  # setuptools and auditwheel read it
    tree = folder / "tree"
    packages.copy_tracked(tree)
    lib = tree / f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    shutil.copytree(native, lib / "torch_uvm" / "_native")
    command = [sys.executable, "setup.py", "-q", "build_py", "bdist_wheel", "--skip-build"]
    flavour.output_of(["env", "-C", tree, *command])
    (wheel,) = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel, "a", zipfile.ZIP_DEFLATED) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = json.dumps(provenance(built, test), indent=1)
        file = zipfile.ZipInfo(metadata.replace("METADATA", "provenance.json"))  # auditwheel records it
        archive.writestr(file, text)
    return wheel


def audited(wheel: Path, output: Path) -> Path:
    """The wheel under its platform's name. Fails if it needs what the platform lacks. Libraries of torch and
    of CUDA are not taken in: torch loads them before."""
    excluded = ["libc10*.so*", "libtorch*.so*", "libcudart.so*"]
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM, "--only-plat"]
    command += [word for name in excluded for word in ("--exclude", name)]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*command, "-w", str(output), str(wheel)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        shown = subprocess.run(
            [*command[:3], "show", str(wheel)], env=environment, capture_output=True, text=True
        )
        raise flavour.Failed(done.stdout + done.stderr + shown.stdout)
    return packages.wheel_in(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--test", action="store_true", help="link the test doubles in")
    parser.add_argument("output", type=Path, help="the folder for the wheel")
    parser.add_argument("versions", nargs="*", help="versions of torch; without any: all that are pinned")
    arguments = parser.parse_args()
    built = arguments.versions or versions()
    try:
        flavour.fetch(with_torch=False)
        with tempfile.TemporaryDirectory() as folder:
            native = Path(folder) / "native"
            for version in built:
                build(version, native, arguments.test)
            arguments.output.mkdir(parents=True, exist_ok=True)
            made = audited(pack(native, built, arguments.test, Path(folder)), arguments.output.resolve())
    except flavour.Failed as error:
        sys.exit(str(error))
    print(f"{made}: {made.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
