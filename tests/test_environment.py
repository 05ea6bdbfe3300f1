"""The effects of the environment variables, and none without them. Each test runs in a process of its own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from _spawn import Spawn, python_path

from torch_uvm import _environment
from torch_uvm._util import runtime

ROOT = Path(__file__).resolve().parent.parent
EMU = {"TORCH_UVM_DEVICE": "emu"}


@pytest.fixture
def installed(tmp_path: Path, spawn: Spawn) -> Spawn:
    """`spawn` with the entry point of pyproject.toml installed, whether or not torch_uvm is."""
    declared = re.search(
        r'^\[project\.entry-points\."torch\.backends"\]\n(.*?)\n\n',
        (ROOT / "pyproject.toml").read_text(),
        re.M | re.S,
    )
    assert declared
    site = tmp_path / "site"
    metadata = site / "torch_uvm-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_uvm\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\n" + declared[1].replace('"', "") + "\n")

    class Installed(Spawn):
        def __call__(self, code=None, *, env=None, **rest):  # type: ignore[no-untyped-def]
            path = {"PYTHONPATH": python_path(site), "TORCH_DEVICE_BACKEND_AUTOLOAD": None}
            return super().__call__(code, env={**path, **(env or {})}, **rest)

    return Installed(tmp_path)


MANAGED = """
    import torch
    device = torch.accelerator.current_accelerator()
    made = torch.ones(4, device=device)
    import torch_uvm
    assert torch_uvm.is_managed(made) and torch_uvm.is_enabled(), device
"""


class TestEntryPoint:
    @pytest.mark.parametrize("env", [{}, {"TORCH_UVM": "0", "PYTORCH_ENABLE_UNIFIED_MEMORY": "off"}])
    def test_does_nothing_unless_asked(self, installed: Spawn, env: dict[str, str]) -> None:
        installed(
            """
            import sys, torch
            assert "torch_uvm_autoload" in sys.modules, "the entry point was not found"
            assert "torch_uvm" not in sys.modules
            assert torch._C._get_privateuse1_backend_name() == "privateuseone"
            """,
            env=env,
        )

    @pytest.mark.parametrize(
        "variable", ["TORCH_UVM=1", "TORCH_UVM=ON", "PYTORCH_ENABLE_UNIFIED_MEMORY=true"]
    )
    def test_turns_an_unchanged_script_on(self, installed: Spawn, variable: str) -> None:
        name, _, value = variable.partition("=")
        installed(MANAGED, env={name: value, **EMU})

    def test_registers_only_the_device_on_request(self, installed: Spawn) -> None:
        installed(
            """
            import torch
            assert torch.accelerator.current_accelerator() == torch.device("emu")
            made = torch.ones(4, device="emu")
            import torch_uvm
            assert not torch_uvm.is_enabled() and not torch_uvm.is_managed(made)
            """,
            env=EMU,
        )

    def test_importing_torch_uvm_before_torch(self, installed: Spawn) -> None:
        """torch is then imported by torch_uvm and calls the entry point, which imports torch_uvm."""
        installed("import torch_uvm" + MANAGED.replace("\n    ", "\n"), env={"TORCH_UVM": "1", **EMU})

    def test_fails_the_import_of_torch_by_name(self, installed: Spawn) -> None:
        done = installed("import torch", env={"TORCH_UVM": "yes"}, check=False)
        assert done.returncode == 1
        assert "TORCH_UVM='yes'" in done.stderr and "1, true, on" in done.stderr


class TestSwitches:
    def test_torch_uvms_variable_takes_precedence(self, spawn: Spawn) -> None:
        spawn(
            "import torch_uvm; assert not torch_uvm.is_enabled()",
            env={"TORCH_UVM": "0", "PYTORCH_ENABLE_UNIFIED_MEMORY": "1", **EMU},
        )

    def test_empty_is_not_set(self, spawn: Spawn) -> None:
        spawn(
            "import torch_uvm; assert torch_uvm.is_enabled()",
            env={"TORCH_UVM": "", "PYTORCH_ENABLE_UNIFIED_MEMORY": "1", "TORCH_UVM_CONF": "", **EMU},
        )


class TestNames:
    def test_every_variable_of_ours_is_known(self) -> None:
        """Variables that the package, its build or its tests read must not be refused as misspellings."""
        files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        read = r"""(?:environ(?:\.get|\.setdefault)?[(\[]|getenv\()\s*["'](TORCH_UVM_\w+)"""
        found = {
            name
            for file in files.stdout.splitlines()
            if file.endswith((".py", ".cpp", ".h"))
            for name in re.findall(read, (ROOT / file).read_text())
        }
        assert {"TORCH_UVM_CONF", "TORCH_UVM_CUDA", "TORCH_UVM_FAULTS"} <= found
        assert sorted(found - _environment.DEVELOPERS.union(_environment.OURS)) == []

    def test_one_that_is_empty_is_not_set(self, spawn: Spawn) -> None:
        spawn("import torch_uvm", env={"TORCH_UVM_BUDGET": " ", **EMU})

    def test_variables_of_developers_are_accepted(self, spawn: Spawn) -> None:
        build = {"TORCH_UVM_UNITY": "0", "TORCH_UVM_CHECK_EVERY": "7", "TORCH_UVM_CALLS": "1"}
        assert spawn("import torch_uvm", env={**build, **EMU}).stderr == ""

    @pytest.mark.parametrize(
        "name, meant",
        [
            ("TORCH_UVM_BUDGET", "TORCH_UVM_CONF=key:value"),
            ("TORCH_UVM_CONFIG", "did you mean TORCH_UVM_CONF?"),
            ("TORCH_UVM_XYZZY", "known: TORCH_UVM, "),
        ],
    )
    def test_others_are_ignored_with_a_warning(self, name: str, meant: str, spawn: Spawn) -> None:
        said = spawn("import torch_uvm", env={name: "20GiB", **EMU}).stderr
        assert f"UserWarning: {name}='20GiB' in the environment is no variable" in said and meant in said


class TestOptions:
    def test_is_reported_in_one_line_on_the_command_line(self, spawn: Spawn) -> None:
        done = spawn(args=["-m", "torch_uvm", "info"], env={"TORCH_UVM_CONF": "budget:x", **EMU}, check=False)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.startswith("torch_uvm: TORCH_UVM_CONF='budget:x'") and done.stderr.count("\n") == 1

    def test_set_options_and_configure_the_accelerator(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch, torch_uvm, unittest
            values = {option["key"]: option["value"] for option in torch_uvm._C.describe_options()}
            assert values["limit"] == "96MiB" and values["emulated_devices"] == "3", values
            assert torch.accelerator.device_count() == 3
            assert torch_uvm._C.device_properties(2)["total_memory"] == 8 * 1024**2
            torch_uvm.enable()  # keeps the limit in force
            torch.ones(8, 1024, 1024, device="emu:2")  # 32 MiB
            with unittest.TestCase().assertRaisesRegex(torch.OutOfMemoryError, "96.00 MiB"):
                torch.ones(32, 1024, 1024, device="emu:2")  # 128 MiB
            """,
            env={"TORCH_UVM_CONF": "limit:96MiB, emulated_devices:3,emulated_memory:8MiB", **EMU},
        )

    def test_configure_replaces_the_emulators_options(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch, torch_uvm
            torch_uvm.emulated.configure(devices=2, memory="16MiB", seed=7)
            values = {option["key"]: option["value"] for option in torch_uvm._C.describe_options()}
            assert values["emulated_devices"] == "2" and values["emulated_schedule_seed"] == "7", values
            assert values["limit"] == "1GiB", values
            torch.ones(4, device="emu:1")
            assert torch_uvm._C.device_properties(1)["total_memory"] == 16 * 1024**2
            """,
            env={"TORCH_UVM_CONF": "limit:1GiB,emulated_devices:5,emulated_memory:8MiB", **EMU},
        )


class TestDevice:
    def test_one_log_line_says_that_the_figures_are_modelled(self, spawn: Spawn) -> None:
        done = spawn(
            """
            import logging
            logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
            import torch_uvm
            """,
            env=EMU,
        )
        lines = [line for line in done.stderr.splitlines() if line.startswith("torch_uvm ")]
        assert len(lines) == 1
        assert "INFO" in lines[0] and "emulated" in lines[0] and "modelled" in lines[0]
        assert "TORCH_UVM_DEVICE=emu" in lines[0]

    def test_is_quiet_by_default(self, spawn: Spawn) -> None:
        done = spawn("import torch_uvm", env=EMU)
        assert done.stdout == "" and "torch_uvm" not in done.stderr


@pytest.mark.parametrize("count", [0, 2])
def test_gpus_are_counted_without_nvml_and_without_initialising_cuda(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = (
        f"int cuInit(unsigned) {{ return 0; }}\nint cuDeviceGetCount(int* n) {{ *n = {count}; return 0; }}\n"
    )
    (tmp_path / "driver.c").write_text(driver)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", tmp_path / "driver.c", "-o", library], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: -1)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: pytest.fail("initialises"), raising=False)
    assert runtime.has_gpu() == (count > 0)


def test_beside_an_accelerator_that_has_no_backend(spawn: Spawn) -> None:
    """An accelerator that torch_uvm does not support: nothing is registered, queries are answered, and
    requests for managed memory are refused by name."""
    spawn(
        """
        import json, io, contextlib, unittest
        import torch
        torch.accelerator.current_accelerator = lambda check_available=False: torch.device("xpu")
        import torch_uvm
        from torch_uvm.cli import info
        assert torch_uvm._C.backend() == "none" and not hasattr(torch, "emu")
        assert torch._C._get_privateuse1_backend_name() == "privateuseone"
        with contextlib.redirect_stdout(io.StringIO()) as out:
            info.main(["--json"])
        assert json.loads(out.getvalue())["backend"] == "none"
        assert torch_uvm.memory.memory_allocated() == 0 and torch_uvm.memory.memory_snapshot() == []
        torch_uvm.memory.reset_peak_memory_stats()
        torch_uvm.memory.empty_cache()
        zeros = lambda: torch_uvm.memory.zeros(3, device="cpu")
        for call in (torch_uvm.enable, torch_uvm.enabled().__enter__, zeros):
            with unittest.TestCase().assertRaisesRegex(RuntimeError, "TORCH_UVM_DEVICE=emu"):
                call()
        assert not torch_uvm.is_enabled()
        """
    )


def test_statistics_do_not_start_the_accelerator(spawn: Spawn) -> None:
    spawn(
        """
        import torch_uvm
        assert torch_uvm.memory.memory_stats()["num_ooms"] == 0
        torch_uvm.emulated.configure(devices=2)
        """
    )
