"""The training script of the examples, unchanged and at a small scale, and the functions of the demo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _spawn import Spawn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import demo  # noqa: E402

# 0.4 M parameters: 6.5 MiB with gradients and AdamW's state, without activations.
SMALL = [
    "--steps=3",
    "--layers=2",
    "--heads=2",
    "--width=128",
    "--batch=2",
    "--context=32",
    "--data-bytes=200000",
    "--validation-batches=2",
]
MEMORY = "emulated_memory:4MiB"


def train(
    folder: Path, *launcher: str, arguments: list[str] | None = None, **environment: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any] | None]:
    """Runs the script in `folder`. Returns the outcome and its output."""
    result, script = folder / "result.json", str(ROOT / "examples" / "train_gpt.py")
    args = [*launcher, script, *SMALL, *(arguments or []), f"--json={result}"]
    done = Spawn(folder)(args=args, env=environment, check=False)
    return done, json.loads(result.read_text()) if result.exists() else None


def losses(result: dict[str, Any] | None) -> list[str]:
    assert result is not None
    return [*result["losses_hex"], result["validation_loss_hex"]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done, result = train(tmp_path_factory.mktemp("cpu"), arguments=["--device=cpu"])
    assert done.returncode == 0, done.stderr
    assert result is not None
    return result


class TestTrainGpt:
    def test_loss_falls_on_the_cpu(self, reference: dict[str, Any]) -> None:
        assert reference["device"] == "cpu"
        assert len(reference["losses"]) == 3
        assert reference["losses"][-1] < reference["losses"][0]
        assert float.fromhex(reference["validation_loss_hex"]) == reference["validation_loss"]

    def test_seed_changes_the_losses(self, reference: dict[str, Any], tmp_path: Path) -> None:
        done, result = train(tmp_path, arguments=["--device=cpu", "--seed=1"])
        assert done.returncode == 0, done.stderr
        assert losses(result) != losses(reference)

    def test_heads_must_divide_the_width(self, tmp_path: Path) -> None:
        done, result = train(tmp_path, arguments=["--heads=3"])
        assert done.returncode == 2
        assert "--heads 3 must divide --width 128" in done.stderr
        assert result is None

    def test_emulated_accelerator_is_used_and_gives_the_same_losses(
        self, reference: dict[str, Any], tmp_path: Path
    ) -> None:
        done, result = train(tmp_path, TORCH_UVM_DEVICE="emu")
        assert done.returncode == 0, done.stderr
        assert result is not None and result["device"].startswith("emu")
        assert losses(result) == losses(reference)

    def test_plain_run_beyond_device_memory_raises_out_of_memory(self, tmp_path: Path) -> None:
        done, result = train(tmp_path, TORCH_UVM_DEVICE="emu", TORCH_UVM_CONF=MEMORY)
        assert done.returncode == 1
        assert demo.last_error(done.stderr) == "OutOfMemoryError"
        assert "torch.OutOfMemoryError" in done.stderr
        assert result is None

    def run_managed(self, folder: Path, budget: str) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Runs the script under torch_uvm on a device that is too small. Returns its output and the
        statistics."""
        stats = folder / f"{budget}.json"
        launcher = ["-m", "torch_uvm", "run", "--conf", MEMORY, "--budget", budget, "--stats", str(stats)]
        done, result = train(folder, *launcher, TORCH_UVM_DEVICE="emu")
        assert done.returncode == 0, done.stderr
        return result, json.loads(stats.read_text())

    def test_managed_run_beyond_device_memory_gives_the_same_losses(
        self, reference: dict[str, Any], tmp_path: Path
    ) -> None:
        result, figures = self.run_managed(tmp_path, "none")
        assert losses(result) == losses(reference)
        (device,) = figures["emulated"]["devices"]
        assert device["memory"] == 4 << 20
        assert 0 < device["peak_resident_bytes"] <= device["memory"] < figures["peak_managed_bytes"]
        assert device["counters"]["evicted_pages"] > 0
        assert max(sample[1] for sample in device["timeline"]) <= device["memory"]
        assert figures["residency"]["plan_hits"] == figures["residency"]["plan_misses"] == 0

    @pytest.mark.parametrize("budget", ["auto", "85%"])
    def test_budget_gives_the_same_losses_with_less_migration(
        self, reference: dict[str, Any], tmp_path: Path, budget: str
    ) -> None:
        _, driver = self.run_managed(tmp_path, "none")
        result, engine = self.run_managed(tmp_path, budget)
        assert losses(result) == losses(reference)
        residency = engine["residency"]
        assert residency["fetched"]["bytes"] > 0 and residency["written_back"]["bytes"] > 0
        assert residency["host_bytes"] > 0 and residency["failures"] == 0
        migrated = [run["emulated"]["counters"]["bytes_to_device"] for run in (driver, engine)]
        assert migrated[1] < migrated[0] / 2
        assert engine["emulated"]["time_us"] < driver["emulated"]["time_us"]

    def test_environment_variable_alone_turns_it_on(self, reference: dict[str, Any], tmp_path: Path) -> None:
        done, result = train(tmp_path, TORCH_UVM="1", TORCH_UVM_DEVICE="emu", TORCH_UVM_CONF=MEMORY)
        assert done.returncode == 0, done.stderr
        assert losses(result) == losses(reference)


class TestRunStats:
    def run_code(self, folder: Path, code: str, stats: str) -> subprocess.CompletedProcess[str]:
        script = folder / "script.py"
        script.write_text(code)
        command = ["-m", "torch_uvm", "run", "--stats", stats, str(script)]
        return Spawn(folder)(args=command, env={"TORCH_UVM_DEVICE": "emu"}, check=False)

    def test_written_when_the_script_raises(self, tmp_path: Path) -> None:
        stats = tmp_path / "stats.json"
        code = "import torch\nx = torch.ones(1 << 20, device='emu')\nraise KeyError('mine')\n"
        done = self.run_code(tmp_path, code, str(stats))
        assert done.returncode == 1
        assert "KeyError: 'mine'" in done.stderr
        figures = json.loads(stats.read_text())
        assert figures["peak_managed_bytes"] >= 4 << 20
        assert figures["memory"]["allocated_bytes.all.peak"] >= 4 << 20

    def test_written_when_the_script_exits_elsewhere(self, tmp_path: Path) -> None:
        code = "import os, sys\nos.chdir('/')\nsys.exit(7)\n"
        done = self.run_code(tmp_path, code, "stats.json")  # relative to the folder of the command
        assert done.returncode == 7
        assert json.loads((tmp_path / "stats.json").read_text())["backend"] in ("emulated", "none")

    def test_missing_folder_is_refused_before_the_script_runs(self, tmp_path: Path) -> None:
        done = self.run_code(tmp_path, "print('ran')\n", str(tmp_path / "missing" / "stats.json"))
        assert done.returncode == 2
        assert "missing" in done.stderr
        assert "ran" not in done.stdout


class TestDemoFunctions:
    @pytest.mark.parametrize(
        ("working_set", "mib"),
        [(0, 1), (4 << 20, 1), ((8 << 20) - 1, 1), (8 << 20, 2), (241 << 20, 60)],
    )
    def test_quarter_is_whole_mebibytes(self, working_set: int, mib: int) -> None:
        assert demo.quarter(working_set) == mib

    @pytest.mark.parametrize(
        ("count", "text"),
        [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (5 << 40, "5120.0 GiB")],
    )
    def test_bytes_are_readable(self, count: int, text: str) -> None:
        assert demo.format_bytes(count) == text

    def test_last_step_and_error_are_read_from_the_scripts_output(self) -> None:
        errors = (
            "\rtraining:   0%|          | 0/60 [00:00<?, ?step/s]\rtraining:   5%|# | 3/60 [00:01<00:20]\n"
            'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n'
            "KeyError: 'first'\n\nDuring handling of the above exception, another exception occurred:\n\n"
            "torch.OutOfMemoryError: no room\n  a table\n"
        )
        assert demo.last_step(errors) == 3
        assert demo.last_error(errors) == "OutOfMemoryError"
        assert demo.last_step("nothing") is None
        assert demo.last_error("nothing") is None

    def test_ending_is_the_last_exception_or_the_last_lines(self) -> None:
        errors = "\rbar 1\rbar 2\nKeyError: 1\n\nAgain\ntorch.OutOfMemoryError: no room\n  table\n"
        assert demo.ending(errors) == "    torch.OutOfMemoryError: no room\n      table"
        assert demo.ending("one\n\rbar 1\rbar 2\nthree\n\n", 2) == "    bar 2\n    three"

    def test_ended_describes_the_exit(self) -> None:
        assert demo.how_it_ended(demo.Run(0, 1.0, "", None, None)) == "trained"
        assert demo.how_it_ended(demo.Run(-9, 1.0, "", None, None)) == "exit code -9"
        errors = "\rtraining: 0%| | 0/60 [00:00<?]\ntorch.OutOfMemoryError: no room\n"
        assert demo.how_it_ended(demo.Run(1, 1.0, errors, None, None)) == "OutOfMemoryError, step 0"

    def test_equality_is_of_every_bit_of_every_loss(self) -> None:
        def run(last: float) -> demo.Run:
            result = {"losses_hex": [(1.5).hex(), last.hex()], "validation_loss_hex": (2.5).hex()}
            return demo.Run(0, 1.0, "", result, None)

        reference = run(0.1)
        assert demo.equality(run(0.1), reference) == "yes"
        assert demo.equality(run(0.1 + 2e-17), reference) == "NO"
        assert demo.equality(reference, reference) == demo.NOTHING
        assert demo.equality(demo.Run(1, 1.0, "", None, None), reference) == demo.NOTHING

    def managed_run(self, plan_hits: int) -> demo.Run:
        """Statistics of a run: 3 MiB to the device by faults, 5 MiB by copies."""
        moved = {"bytes_to_device": 3 << 20, "bytes_copied_to_device": 5 << 20, "bytes_to_host": 1 << 20}
        counters = moved | {"bytes_copied_to_host": 0, "bytes_in_place": 7 << 20, "faults_on_device": 48}
        device = {
            "memory": 4 << 20,
            "peak_resident_bytes": 4 << 20,
            "timeline": [[0, 0, 0, 0], [5e5, 4 << 20, 0, 6 << 20]],
        }
        stats = {
            "emulated": {"counters": counters, "devices": [device], "time_us": 2.5e6},
            "residency": {"plan_hits": plan_hits, "plan_misses": 1, "over_budget": 2},
        }
        result = {"losses_hex": [(1.5).hex()], "validation_loss_hex": (2.5).hex(), "validation_loss": 2.5}
        return demo.Run(0, 1.0, "", result, stats)

    def test_column_of_a_run_has_bytes_by_kind_of_transfer(self) -> None:
        column = demo.figures(self.managed_run(0), demo.Run(0, 1.0, "", None, None))
        assert column["bytes to the device, by faults"] == "3.0 MiB"
        assert column["bytes to the device, copied"] == "5.0 MiB"
        assert column["bytes used in place, on the host"] == "7.0 MiB"
        assert column["modelled time of memory traffic"] == "2.50 s"
        assert "operators that came as planned" not in column
        column = demo.figures(self.managed_run(9), demo.Run(0, 1.0, "", None, None))
        assert column["operators that came as planned"] == "9 of 10"

    def test_picture_is_drawn_from_the_statistics(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        from _plot import plot_residency

        stats = self.managed_run(9).stats
        assert stats is not None
        plot_residency(stats, stats, 16 << 20, tmp_path / "residency.png")
        assert (tmp_path / "residency.png").read_bytes().startswith(b"\x89PNG")

    def test_table_has_a_row_for_each_figure_of_any_column(self) -> None:
        table = demo.format_table({"CPU": {"ended": "trained"}, "emu": {"ended": "no", "faults": "12"}})
        assert table.splitlines() == [
            "        CPU      emu",
            "------  -------  ---",
            "ended   trained  no",
            "faults  -        12",
        ]

    def test_environment_is_cleaned_of_switches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCH_UVM", "1")
        monkeypatch.setenv("TORCH_UVM_CONF", "limit:1GiB")
        monkeypatch.setenv("PYTORCH_ENABLE_UNIFIED_MEMORY", "1")
        environment = demo.clean_environment(TORCH_UVM_DEVICE="emu")
        assert {key for key in environment if key.startswith("TORCH_UVM")} == {"TORCH_UVM_DEVICE"}
        assert "PYTORCH_ENABLE_UNIFIED_MEMORY" not in environment
