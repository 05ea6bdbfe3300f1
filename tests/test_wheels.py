"""Wheels that hold an extension for each torch: which is chosen, the message if none fits, and the contents.

Nothing is compiled: this environment's extension, or an empty folder, stands for those of a wheel. `make
wheels` compiles them.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from _spawn import Spawn

from torch_uvm import _C
from torch_uvm._util.native import described, search_path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import packages  # noqa: E402
import versions  # noqa: E402
import wheels  # noqa: E402
from check_cuda_flavour import BELOW_TORCH  # noqa: E402

MINOR = ".".join(torch.__version__.split(".")[:2])
EXTENSION = Path(_C.__file__)


class TestChoice:
    FOLDERS = ["torch_2_11_cpu", "torch_2_11_cu13", "torch_2_9_cpu", "torch_2_13_cpu", "torch_2_13_cu13"]

    @pytest.fixture
    def native(self, tmp_path: Path) -> Path:
        for name in self.FOLDERS:
            (tmp_path / name).mkdir()
        (tmp_path / "torch_2_12_cpu").write_text("a file is not an extension")
        return tmp_path

    @pytest.mark.parametrize(
        ("version", "cuda", "chosen"),
        [
            ("2.13.0+cpu", None, "torch_2_13_cpu"),
            ("2.13.1+cu130", "13.0", "torch_2_13_cu13"),
            ("2.11.0", "13.2", "torch_2_11_cu13"),
            ("2.11.0a0+gitabc", None, "torch_2_11_cpu"),
            ("2.13.0+cu126", "12.6", "torch_2_13_cpu"),  # the emulated accelerator; `info` says what to do
            ("2.9.1", "13.0", "torch_2_9_cpu"),
        ],
    )
    def test_by_version_and_cuda(self, native: Path, version: str, cuda: str | None, chosen: str) -> None:
        assert search_path(version, cuda, native) == [str(native / chosen)]

    @pytest.mark.parametrize("version", ["2.12.0+cpu", "2.130.0", "3.13.0", "2.16.0.dev20261101+cu130"])
    def test_an_unknown_minor_names_those_there_are(self, native: Path, version: str) -> None:
        with pytest.raises(ImportError) as raised:
            search_path(version, "13.0", native)
        assert str(raised.value) == (
            f"this torch_uvm has no extension for torch {version} with CUDA 13.0; it has those for torch "
            "2.9 (CPU), 2.11 (CPU), 2.11 (CUDA 13), 2.13 (CPU), 2.13 (CUDA 13)"
        )

    def test_none_was_built(self, tmp_path: Path) -> None:
        with pytest.raises(ImportError, match="no CUDA; it has none"):
            search_path(torch.__version__, None, tmp_path / "absent")

    def test_a_build_from_source_has_the_name_of_a_wheels(self) -> None:
        flavour = "cpu" if torch.version.cuda is None else f"cu{torch.version.cuda.split('.')[0]}"
        assert EXTENSION.parent.name == wheels.native_name(torch.__version__, flavour)

    def test_names_are_those_that_wheels_have(self) -> None:
        assert [wheels.native_name("2.13.0", kind) for kind in wheels.FLAVOURS] == [
            "torch_2_13_cpu",
            "torch_2_13_cu13",
        ]
        assert described("torch_2_13_cu13") == "2.13 (CUDA 13)"


class TestImport:
    """The package, with folders as a wheel has them, in processes of their own."""

    @pytest.fixture
    def site(self, tmp_path: Path) -> Path:
        site = tmp_path / "site"
        leave_out = shutil.ignore_patterns("*.so", "_native", "__pycache__")
        shutil.copytree(ROOT / "torch_uvm", site / "torch_uvm", ignore=leave_out)
        shutil.copy2(ROOT / "torch_uvm_autoload.py", site)
        return site

    def test_the_extension_for_this_torch(self, site: Path, spawn: Spawn) -> None:
        flavour = "cu" + torch.version.cuda.split(".")[0] if torch.version.cuda else "cpu"
        native = site / "torch_uvm" / "_native"
        chosen = native / wheels.native_name(torch.__version__, flavour)
        for folder in (chosen, native / "torch_2_10_cpu"):
            folder.mkdir(parents=True)
        shutil.copy2(EXTENSION, chosen)
        code = """
            import torch, torch_uvm, torch_uvm._C
            print(torch_uvm._C.__name__, torch_uvm._C.__file__, torch.ones(3, device="emu").sum().item())
        """
        done = spawn(code, env={"PYTHONPATH": str(site), "TORCH_UVM_DEVICE": "emu"})
        assert done.stdout.split() == ["torch_uvm._C", str(chosen / EXTENSION.name), "3.0"]

    def test_none_for_this_torch(self, site: Path, spawn: Spawn) -> None:
        for name in ("torch_2_10_cpu", "torch_2_10_cu13"):
            (site / "torch_uvm" / "_native" / name).mkdir(parents=True)
        done = spawn("import torch_uvm", env={"PYTHONPATH": str(site)}, check=False)
        assert done.returncode == 1
        assert f"no extension for torch {torch.__version__}" in done.stderr
        assert "it has those for torch 2.10 (CPU), 2.10 (CUDA 13)" in done.stderr
        done = spawn(args=["-m", "torch_uvm", "info"], env={"PYTHONPATH": str(site)}, check=False)
        assert done.returncode != 0 and "Traceback" not in done.stderr
        assert "2.10 (CPU), 2.10 (CUDA 13)" in done.stderr

    def test_an_extension_that_lies_beside_the_package_is_not_loaded(self, site: Path, spawn: Spawn) -> None:
        """It may be of any torch."""
        shutil.copy2(EXTENSION, site / "torch_uvm")
        done = spawn("import torch_uvm", env={"PYTHONPATH": str(site)}, check=False)
        assert done.returncode == 1 and "it has none" in done.stderr

    @pytest.mark.parametrize("variable", ["TORCH_UVM", "TORCH_UVM_DEVICE"])
    def test_an_unknown_torch_is_still_imported(self, site: Path, spawn: Spawn, variable: str) -> None:
        (site / "torch_uvm" / "_native" / "torch_2_10_cpu").mkdir(parents=True)
        entry = site / "torch_uvm-0.dist-info"
        entry.mkdir()
        (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_uvm\nVersion: 0\n")
        text = "[torch.backends]\ntorch_uvm = torch_uvm_autoload:autoload\n"
        (entry / "entry_points.txt").write_text(text)
        code = "import torch; print(torch.ones(2).sum().item())"
        done = spawn(code, env={"PYTHONPATH": str(site), variable: "emu" if "DEVICE" in variable else "1"})
        assert done.stdout.split() == ["2.0"]
        assert done.stderr.count("it has those for torch 2.10 (CPU)") == 1
        assert f"{variable} is set, but torch_uvm is not in use" in done.stderr


def packed(folder: Path) -> Path:
    """A wheel that is not audited."""
    for kind in wheels.FLAVOURS:
        target = folder / "native" / wheels.native_name(MINOR, kind)
        target.mkdir(parents=True)
        shutil.copyfile(EXTENSION, target / EXTENSION.name)
    return wheels.pack(folder / "native", [f"{MINOR}.0"], True, folder)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(tmp_path_factory.mktemp("wheel"))


class TestContents:
    def test_the_package_and_each_extension(self, wheel: Path) -> None:
        tracked = {path for path in packages.tracked_files() if path.startswith("torch_uvm")}
        folders = [wheels.native_name(MINOR, kind) for kind in wheels.FLAVOURS]
        native = {f"torch_uvm/_native/{folder}/{EXTENSION.name}" for folder in folders}
        found = {path for path in packages.files_of(wheel) if ".dist-info/" not in path}
        assert found == tracked | native
        python = f"cp{sys.version_info.major}{sys.version_info.minor}"
        assert wheel.name.split("-")[2:4] == [python, python]

    def test_the_same_files_make_the_same_bytes(self, wheel: Path, tmp_path: Path) -> None:
        again = packed(tmp_path)
        assert (again.name, again.read_bytes()) == (wheel.name, wheel.read_bytes())

    def test_provenance(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/provenance.json"))
            told = json.loads(archive.read(name))
        assert told["torch"] == [f"{MINOR}.0"] and told["test_doubles"] is True
        assert told["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
        assert told["compiler"] and told["flags"] == wheels.FLAGS and told["cuda"]["nvidia-cuda-runtime"]

    def test_every_source_is_compiled_once_for_each_flavour(self) -> None:
        """Those that the wheel compiles, against those that setup.py does."""
        parts = [
            wheels.sources(BELOW_TORCH),
            wheels.sources([*wheels.WITHOUT_PYTHON, "python"]),
            wheels.BY_FLAVOUR,
            wheels.sources(["cuda"]),
        ]
        every = [path for part in parts for path in part]
        assert sorted(every) == sorted((ROOT / "csrc").rglob("*.cpp"))
        groups = wheels.by_layer(every)
        assert sorted(path for group in groups for path in group) == sorted(every)

    def test_files_that_know_the_flavour(self) -> None:
        with_macro = [
            path for path in (ROOT / "csrc").rglob("*.cpp") if "TORCH_UVM_WITH_CUDA" in path.read_text()
        ]
        assert sorted(with_macro) == sorted(wheels.BY_FLAVOUR)
        assert "TORCH_UVM_WITH_CUDA" not in "".join(
            path.read_text().replace("test TORCH_UVM_WITH_CUDA before", "")
            for path in (ROOT / "csrc").rglob("*.h")
        )


class TestVersions:
    """What `make test-versions` runs, and the table that it prints."""

    def test_every_named_file_is_there(self) -> None:
        names = sorted(path.name for path in (ROOT / "tests").glob("test_*.py"))
        assert [pattern for pattern in versions.LEFT_OUT if not fnmatch.filter(names, pattern)] == []
        assert set(versions.CPU_FLAVOUR) <= set(versions.emulator_tests())
        assert set(versions.CONTROL_PATHS) <= set(names) - set(versions.emulator_tests())

    def test_a_row_for_each_torch(self) -> None:
        row = {
            "date": "2026-11-24",
            "files": "7",
            "emulator": "3 failed, 812 passed",
            "audit": "passed",
            "cpu": "9 passed",
        }
        made = versions.table({"2.13.0+cpu": row, "2.9.1": {"date": "2026-11-23", "emulator": "no CUDA"}})
        assert made.splitlines()[2:] == [
            "| 2.9.1 | 2026-11-23 | - | no CUDA | - | - | - |",
            "| 2.13.0+cpu | 2026-11-24 | 7 | 3 failed, 812 passed | passed | - | 9 passed |",
        ]


def test_the_wheel_to_try_is_for_this_python(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="make wheels"):
        packages.wheel_in(tmp_path)
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for tag in (python, "cp39"):
        (tmp_path / f"torch_uvm-0.2.0-{tag}-{tag}-{wheels.PLATFORM}.whl").touch()
    assert python in packages.wheel_in(tmp_path).name
