"""`python -m torch_uvm info`: facts about this machine, and what is missing."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from _spawn import Spawn

import torch_uvm
from torch_uvm import cli
from torch_uvm.cli import info, machine
from torch_uvm.cli.shortfalls import shortfalls

EMU = {"TORCH_UVM_DEVICE": "emu"}


def _main(*argv: str) -> int:
    return cli.main(argv)


class TestInfo:
    def _facts(self, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
        assert _main("info", "--json") == 0
        facts: dict[str, Any] = json.loads(capsys.readouterr().out)
        return facts

    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        torch_uvm.enable(limit="3GiB")
        facts = self._facts(capsys)
        assert facts["torch"] == torch.__version__
        assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None and facts["accelerator"] == accelerator.type
        assert facts["emulated"] == (accelerator.type == "emu")
        assert len(facts["devices"]) == torch.accelerator.device_count()
        assert facts["devices"][0]["total_memory"] > 0
        assert (facts["enabled"], facts["limit"]) == (True, 3 * 1024**3)
        assert facts["options"] == torch_uvm._C.describe_options()
        torch_uvm.disable()
        assert not self._facts(capsys)["enabled"]

    def test_text(self, capsys: pytest.CaptureFixture[str]) -> None:
        torch_uvm.set_limit("3GiB")
        assert _main("info") == 0
        text = capsys.readouterr().out
        assert torch.__version__ in text and re.search(r"^limit +3.00 GiB$", text, re.M)
        assert re.search(r"^enabled +False$", text, re.M)
        for option in torch_uvm._C.describe_options():
            row = " +".join(re.escape(option[column]) for column in ("key", "value", "description"))
            assert re.search(f"^  {row}$", text, re.M), option["key"]
            assert option["accepted"] in text

    def test_a_block_for_an_issue(self, spawn: Spawn) -> None:
        done = spawn(
            args=["-m", "torch_uvm", "info", "--report"], env=EMU | {"TORCH_UVM_CONF": "budget:64MiB"}
        )
        lines = done.stdout.splitlines()
        assert (lines[0], lines[-1]) == ("```", "```")
        assert re.search(r"^enabled +False$", done.stdout, re.M)
        assert re.search(r"^  budget_bytes +64.00 MiB$", done.stdout, re.M)
        assert re.search(r"^options that are not the default\n  budget +64MiB$", done.stdout, re.M)
        assert "Tensor.to" in done.stdout and re.search(r"^not_there +none$", done.stdout, re.M)
        assert "accepted:" not in done.stdout

    def test_the_link_is_measured_with_ordinary_memory(self, capsys: pytest.CaptureFixture[str]) -> None:
        managed = torch_uvm._C.managed_bytes()
        link = self._facts(capsys)["link"]
        assert link["device"].startswith(str(torch.accelerator.current_accelerator()))
        assert 0 < link["bytes"] <= machine.LINK_BYTES
        assert torch_uvm._C.managed_bytes() == managed
        assert link["modelled"] == (torch_uvm._C.backend() == "emulated")
        if link["modelled"]:  # the profile in docs/emulator.md, minus the cost of a call
            assert 0.8 * 55.3 < link["to_device"] <= 55.3 and 0.8 * 55.3 < link["to_host"] <= 55.3

    def test_lists_what_is_off(self, capsys: pytest.CaptureFixture[str]) -> None:
        torch_uvm.set_budget(None)
        off = self._facts(capsys)["off"]
        assert all(it["what"] and it["do"] for it in off)
        listed = " ".join(it["what"] for it in off)
        assert "the switch is off" in listed and "there is no limit" in listed and "no budget" in listed
        torch_uvm.enable(limit="1GiB", budget="auto")
        facts = self._facts(capsys)
        listed = " ".join(it["what"] for it in facts["off"])
        assert "switch" not in listed and "no limit" not in listed and "no budget" not in listed
        assert _main("info") == 0
        text = " ".join(capsys.readouterr().out.split())
        for it in facts["off"]:
            assert f"- {it['what']} {it['do']}" in text

    def test_continues_after_facts_that_cannot_be_determined(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise OSError("not\x1b here\nat all")

        for name in ("driver", "link", "starts_with_torch"):
            monkeypatch.setattr(machine, name, fail)
        monkeypatch.setattr(info, "_devices", fail)
        monkeypatch.setattr(info, "known_bytes", fail)
        facts = self._facts(capsys)
        assert set(facts["errors"]) == {"driver", "starts_with_torch", "devices", "host_available"}
        assert (facts["devices"], facts["link"], facts["host_available"]) == ([], None, None)
        assert _main("info") == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "- driver is unknown: not\\x1b here nothing: the rest" in text

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"torch_cuda": None, "driver": {"nvidia": "580.65", "cuda": None}}, "without CUDA"),
            ({"cuda_devices": 0, "driver": {"nvidia": None, "cuda": None}}, "finds no driver"),
            ({"cuda_devices": 0, "driver": {"nvidia": "470.1", "cuda": "11.4"}}, "CUDA 11.4 at most"),
            ({"cuda_devices": 0}, "CUDA_VISIBLE_DEVICES"),
            ({"built_for": "CPU"}, "TORCH_UVM_CUDA=0"),
            ({"backend": "none", "accelerator": "xpu"}, "accelerator xpu"),
            ({"backend": "emulated", "emulated": True}, "is emulated"),
            ({"device": {"managed_memory": False}}, "has no managed memory"),
            ({"device": {"concurrent_managed_access": False}}, "concurrentManagedAccess is 0"),
            ({"device": {"budget": "none"}}, "has no budget"),
            ({"host_available": 1}, "less memory available"),
            ({"enabled": False}, "switch is off"),
            ({"starts_with_torch": False}, "no entry point"),
            ({"limit": None}, "no limit"),
            ({"errors": {"driver": "gone"}}, "driver is unknown: gone"),
        ],
        ids=lambda it: it if isinstance(it, str) else "",
    )
    def test_each_rule(self, changed: dict[str, Any], said: str) -> None:
        device = {"device": "cuda:0", "budget": "auto", "total_memory": 8 << 30}
        device |= {"managed_memory": True, "concurrent_managed_access": True, "one_memory": False}
        of_device = changed.pop("device", {})
        device |= of_device
        facts = {
            "torch_cuda": "13.0",
            "cuda_devices": 1,
            "built_for": "CUDA",
            "driver": {"nvidia": "580.65", "cuda": "13.0"},
            "accelerator": "cuda",
            "backend": "cuda",
            "emulated": False,
            "enabled": True,
            "starts_with_torch": True,
            "devices": [device],
            "limit": 4 << 30,
            "host_available": 64 << 30,
            "errors": {},
        }
        if not of_device:
            assert shortfalls(facts) == []
        found = shortfalls({**facts, **changed})
        assert len(found) == 1 and said in found[0]["what"] + found[0]["do"]

    def test_the_driver(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "version"
        file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
        monkeypatch.setattr(machine, "_NVIDIA", file)
        monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12080, raising=False)
        assert machine.driver() == {"nvidia": "580.65.06", "cuda": "12.8"}
        monkeypatch.setattr(machine, "_NVIDIA", tmp_path / "none")
        monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 0)
        assert machine.driver() == {"nvidia": None, "cuda": None}

    def test_a_failed_import_is_reported_in_one_line(self, spawn: Spawn) -> None:
        done = spawn(
            args=["-m", "torch_uvm", "info"], env={**EMU, "TORCH_UVM_CONF": "limt:1GiB"}, check=False
        )
        assert done.returncode == 1 and done.stdout == ""
        assert (
            done.stderr.startswith("torch_uvm: TORCH_UVM_CONF='limt:1GiB'") and done.stderr.count("\n") == 1
        )
        (spawn.folder / "torch.py").write_text("raise ImportError('broken')\n")
        done = spawn(args=["-m", "torch_uvm", "info"], env=EMU, check=False, fork=False)
        assert done.returncode == 1
        assert done.stderr == "torch_uvm: it needs torch, which does not load: broken\n"

    def test_as_a_command(self, spawn: Spawn) -> None:
        done = spawn(args=["-m", "torch_uvm", "info", "--json"], env={**EMU, "TORCH_UVM": "1"})
        facts = json.loads(done.stdout)
        assert facts["enabled"] and facts["emulated"] and facts["managed_bytes"] == 0
