"""The source distribution and the wheel, without compilation; `make packages` also compiles.

The wheel contains the extension of these tests. It is installed in an environment of its own, which borrows
this environment's torch.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import torch_uvm
from torch_uvm import _C

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import packages  # noqa: E402

EXTENSION = Path(_C.__file__).relative_to(Path(torch_uvm.__file__).parents[1])

MADE_BY_SETUPTOOLS = ["PKG-INFO", "setup.cfg", "torch_uvm.egg-info/*"]
# Files that a working tree accumulates: compiled, cached and built files.
RUBBISH = [
    "torch_uvm/_native/torch_2_13_cpu/_C.cpython-311-x86_64-linux-gnu.so",
    "torch_uvm/_tensors/__pycache__/moves.cpython-311.pyc",
    "tests/__pycache__/conftest.cpython-311.pyc",
    "csrc/cuda/allocator.o",
    "build/cpp/test_options",
    "demo-output/residency.png",
    "lora-output/checkpoint-4/optimizer.pt",
    ".venv/pyvenv.cfg",
    ".mypy_cache/3.11/os.data.json",
    "dist/torch_uvm-0.0.1.tar.gz",
    "notes.txt",
]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from the files that git tracks, with stray files added."""
    tree = tmp_path_factory.mktemp("tree")
    packages.copy_tracked(tree)
    for path in RUBBISH:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text("rubbish")
    (tree / "dist" / "torch_uvm-0.0.1.tar.gz").unlink()
    return packages.make_sdist(tree)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from the sdist's files."""
    tree = packages.unpack(sdist, tmp_path_factory.mktemp("sdist"))
    built = tree / f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / EXTENSION
    built.parent.mkdir(parents=True)
    shutil.copy2(_C.__file__, built)
    command = [sys.executable, "setup.py", "-q", "build_py", "bdist_wheel", "--skip-build"]
    subprocess.run(command, cwd=tree, check=True)
    (made,) = (tree / "dist").glob("*.whl")
    return made


def pip(python: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, *packages.PIP, "--python", str(python), *arguments], check=True)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    lenders = [path for path in sys.path if Path(path).is_dir() and "-packages" in path]
    (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in lenders))
    pip(python, "install", "--no-deps", "--no-compile", str(wheel))
    return python


def test_the_sdist_has_exactly_the_tracked_files(sdist: Path) -> None:
    found, tracked = packages.files_of(sdist), set(packages.tracked_files())
    assert tracked - found == set()
    more = {path for path in found - tracked if not any(fnmatch.fnmatch(path, p) for p in MADE_BY_SETUPTOOLS)}
    assert more == set()


def test_the_wheel_has_the_package_alone(wheel: Path) -> None:
    found = packages.files_of(wheel)
    tracked = {path for path in packages.tracked_files() if path.startswith("torch_uvm")}
    assert {path for path in found if ".dist-info/" not in path} == tracked | {EXTENSION.as_posix()}
    assert f"-cp{sys.version_info.major}{sys.version_info.minor}-" in wheel.name  # not a pure wheel
    assert any(path.endswith(".dist-info/licenses/LICENSE") for path in found)


def sources_with(variables: dict[str, str]) -> set[str]:
    """The sources that setup.py would compile."""
    code = "import setuptools; from distutils.core import run_setup; "
    code += "print(*run_setup('setup.py', stop_after='init').ext_modules[0].sources)"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCH_UVM")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | variables, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_description_has_no_link_that_is_dead_on_an_index(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (it for it in archive.namelist() if it.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    assert "Description-Content-Type: text/markdown" in text and "## Install" in text
    assert re.findall(r"\]\((?!https?:)", text) == []


def test_test_doubles_are_compiled_in_on_request_alone(wheel: Path) -> None:
    # The extension of these tests has them.
    assert packages.test_doubles_in(wheel) == list(packages.TEST_DOUBLES)
    shipped, all_of_them = sources_with({}), sources_with({"TORCH_UVM_TEST_BINDINGS": "1"})
    left_out = all_of_them - shipped
    assert left_out == {f"tests/cpp/doubles/{name}.cpp" for name in ("failing_calls", "test_bindings")}
    assert [path for path in shipped if '"doubles/' in (ROOT / path).read_text()] == []


def flavour_with(cuda: str, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """What `setup.py flavour` says with a torch for that CUDA, where there is no toolkit."""
    code = (
        f"import runpy, sys, torch; torch.version.cuda = {cuda!r}; sys.argv = ['setup.py', '-q', 'flavour']; "
    )
    code += "runpy.run_path('setup.py', run_name='__main__')"
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("TORCH_UVM", "CUDA"))
    }
    environment |= {"CUDA_HOME": str(tmp_path), **variables}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_a_torch_with_cuda_needs_cudas_headers(tmp_path: Path) -> None:
    done = flavour_with("13.0", tmp_path)
    assert done.returncode == 1 and "nvidia-cuda-runtime==13.*" in done.stderr
    assert "the emulated runtime only" in flavour_with("13.0", tmp_path, TORCH_UVM_CUDA="0").stdout


@pytest.mark.parametrize("layout", [".", "targets/x86_64-linux"])
def test_cudas_headers_are_found_in_each_layout(layout: str, tmp_path: Path) -> None:
    """A toolkit's and PyPI's, and conda's."""
    for file in ("include/cuda_runtime_api.h", "include/crt/host_defines.h", "lib/libcudart.so.13"):
        (tmp_path / layout / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / layout / file).touch()
    assert f"headers in {tmp_path / layout / 'include'}" in flavour_with("13.0", tmp_path).stdout
    assert flavour_with("12.8", tmp_path).returncode == 1  # a library of another major version


def test_it_works_when_installed(installed: Path, wheel: Path, tmp_path: Path) -> None:
    assert Path(torch_uvm.__file__).parent not in installed.parents
    printed = packages.try_out(installed, tmp_path)
    assert re.search(rf"^torch_uvm +{re.escape(wheel.name.split('-')[1])}$", printed, re.MULTILINE)
    assert "smoke test passed" in printed


def test_torch_finds_it_by_its_entry_point(installed: Path, tmp_path: Path) -> None:
    code = (
        "import json, torch; x = torch.ones(3, device='emu'); import torch_uvm; "
        "print(json.dumps([torch_uvm.__file__, x.sum().item()]))"
    )
    where, total = json.loads(packages.run(installed, "-c", code, folder=tmp_path))
    assert installed.parents[1] in Path(where).parents and total == 3


def test_what_uninstalling_leaves_is_seen(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    before = packages.files_below(tmp_path / "env")
    pip(python, "install", "--no-deps", str(wheel))
    (package,) = tmp_path.glob("env/lib/python*/site-packages/torch_uvm")
    assert len(packages.files_below(tmp_path / "env") - before) > 100
    (package / "__pycache__" / "left.pyc").touch()
    pip(python, "uninstall", "-y", "torch_uvm")
    (left,) = packages.files_below(tmp_path / "env") - before
    assert left.name == "left.pyc"
