"""Budgets: requests and their precedence, values in force, and memory that a budget does not cover."""

from __future__ import annotations

import gc
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _spawn import Run, Spawn

import torch_uvm
from torch_uvm import _C

MIB = 1024**2
EMU = {"TORCH_UVM_DEVICE": "emu"}


def asked(device: int = 0) -> str | None:
    return _C.requested_budget(device)


class TestForms:
    @pytest.mark.parametrize(
        ("budget", "text"),
        [
            ("auto", "auto"),
            ("AUTO", "auto"),
            (None, "none"),
            ("none", "none"),
            (" None ", "none"),
            (5 * MIB, "5MiB"),
            (np.int64(4097), "4097"),
            ("20GiB", "20GiB"),
            (" 1.5 GiB ", "1536MiB"),
            ("80%", "80%"),
            (" 12.5 % ", "12.5%"),
        ],
    )
    def test_are_read(self, budget: Any, text: str) -> None:
        torch_uvm.set_budget(budget)
        assert asked() == text
        torch_uvm.set_budget("3MiB")
        torch_uvm.enable(budget=budget)
        assert asked() == text

    @pytest.mark.parametrize(
        ("budget", "error"),
        [
            ("lots", ValueError),
            ("", ValueError),
            (0, ValueError),
            ("0GiB", ValueError),
            (-1, ValueError),
            (2**64, ValueError),
            ("0%", ValueError),
            ("101%", ValueError),
            ("-5%", ValueError),
            ("%", ValueError),
            (0.8, TypeError),
            (True, TypeError),
            (b"4GiB", TypeError),
        ],
    )
    def test_bad_ones_change_nothing(self, budget: Any, error: type[Exception]) -> None:
        torch_uvm.set_budget("3MiB")
        for call in (torch_uvm.set_budget, torch_uvm.enable):
            with pytest.raises(error) as caught:
                call(budget=budget)
            assert str(budget) in str(caught.value) and "budget" in str(caught.value)
            for accepted in ("4096", "'80%'", '"auto" or None ("none")'):
                assert accepted in str(caught.value)
        assert asked() == "3MiB" and not torch_uvm.is_enabled()

    @pytest.mark.parametrize("device", ["cpu", 7, "emu:7", "cuda:0", 1.0, True])
    def test_bad_devices_change_nothing(self, device: Any) -> None:
        torch_uvm.set_budget("3MiB")
        with pytest.raises((TypeError, ValueError), match="accepted: .*emu"):
            torch_uvm.set_budget("4MiB", device=device)
        assert asked() == "3MiB"


LOOK = """
import torch, torch_uvm
from torch_uvm import _C
MIB = 1024**2
def use(device=0):
    return torch_uvm.memory.ones(4, device=f"emu:{device}")
"""


@pytest.fixture(name="look")
def look_in_a_process(spawn: Spawn) -> Run:
    return spawn.after(LOOK, env=EMU)


class TestPrecedence:
    def test_without_a_request(self, look: Run) -> None:
        look(
            """
use()
assert _C.requested_budget(0) is None and _C.budget(0) is None
torch_uvm.enable()
assert _C.requested_budget(0) == "auto"
torch_uvm.disable()
torch_uvm.set_budget(None)
torch_uvm.enable()
assert _C.requested_budget(0) == "none"
with torch_uvm.enabled():
    assert _C.requested_budget(0) == "none" and _C.budget(0) is None
"""
        )

    def test_a_scope_requests_the_default(self, look: Run) -> None:
        look(
            """
with torch_uvm.disabled():
    assert _C.requested_budget(0) is None
with torch_uvm.enabled():
    assert _C.requested_budget(0) == "auto"
"""
        )

    @pytest.mark.parametrize("switch", ["0", "1"])
    def test_that_of_the_environment_holds_until_another_request(self, look: Run, switch: str) -> None:
        look(
            """
assert _C.requested_budget(0) == "8MiB"
use()
assert _C.budget(0) == 8 * MIB
torch_uvm.enable()
assert _C.requested_budget(0) == "8MiB" and _C.budget(0) == 8 * MIB
torch_uvm.enable(budget="16MiB")
torch_uvm.enable()
assert _C.budget(0) == 16 * MIB
torch_uvm.set_budget("12MiB")
torch_uvm.enable()
assert _C.budget(0) == 12 * MIB
torch_uvm.enable(budget=None)
assert _C.requested_budget(0) == "none" and _C.budget(0) is None
""",
            env={**EMU, "TORCH_UVM_CONF": "budget:8MiB", "TORCH_UVM": switch},
        )

    def test_of_single_devices(self, look: Run) -> None:
        look(
            """
torch_uvm.set_budget("8MiB", device=1)
use(0), use(1), use(2)
assert [_C.budget(i) for i in range(3)] == [None, 8 * MIB, None]
torch_uvm.enable(budget="25%")
assert [_C.budget(i) for i in range(3)] == [16 * MIB] * 3
torch_uvm.set_budget(None, device="emu:2")
torch_uvm.enable()
assert [_C.budget(i) for i in range(3)] == [16 * MIB, 16 * MIB, None]
torch_uvm.set_budget(4 * MIB)
assert [_C.budget(i) for i in range(3)] == [4 * MIB] * 3
""",
            env={**EMU, "TORCH_UVM_CONF": "emulated_devices:3,emulated_memory:64MiB"},
        )

    def test_unused_devices_are_not_initialised(self, look: Run) -> None:
        look(
            """
torch_uvm.set_budget("50%")
assert _C.budget(0) is None and not _C.in_use()
torch_uvm.emulated.configure(devices=2, memory="32MiB")
use(0)
assert (_C.budget(0), _C.budget(1)) == (16 * MIB, None)
use(1)
assert _C.budget(1) == 16 * MIB
torch_uvm.set_budget("1GiB")
assert _C.budget(0) == 32 * MIB  # capped by the device's memory
"""
        )

    def test_auto_is_the_free_memory_minus_a_reserve(self, look: Run) -> None:
        look(
            """
plain = torch.ones(4, MIB, device="emu:0")  # 16 MiB that are not managed
torch_uvm.enable()
torch.ones(4, device="emu:0")
assert _C.budget(0) == (64 - 16 - 4) * MIB, _C.budget(0)
del plain
torch.emu.empty_cache()
torch_uvm.enable()
assert _C.budget(0) == 44 * MIB  # measured at the request
torch_uvm.enable(budget="auto")
assert _C.budget(0) == 60 * MIB, _C.budget(0)
""",
            env={**EMU, "TORCH_UVM_CONF": "emulated_memory:64MiB"},
        )

    def test_holds_for_earlier_storages_that_are_not_used_again(self, spawn: Spawn) -> None:
        """The engine sees the operands of operators. It is told of other storages when the budget is set."""
        spawn(
            """
            import torch, torch_uvm
            torch_uvm.enable(budget=None)
            kept = [torch.full((1 << 19,), float(i), device="emu") for i in range(16)]
            used = torch.ones(1 << 18, device="emu")
            torch_uvm.set_budget("8MiB")
            for _ in range(8):
                used.add_(1)
            assert torch_uvm.stats()["device_bytes"][used.device] <= 8 << 20
            assert torch_uvm.stats()["fetched"]["count"] <= 1  # at most one unnecessary fetch
            assert [t.sum().item() / 2**19 for t in kept] == list(range(16)) and used[0].item() == 9
            """
        )

    def test_looks_for_earlier_storages_only_where_some_are_unknown(self, spawn: Spawn) -> None:
        spawn("""
            import gc, torch, torch_uvm
            calls, look = 0, gc.get_objects
            def counted():
                global calls
                calls += 1
                return look()
            gc.get_objects = counted
            torch_uvm.enable(budget=None)
            kept = [torch.ones(1 << 19, device="emu") for _ in range(8)]
            small = [torch.ones(4, device="emu") for _ in range(8)]
            for budget in ("12MiB", "8MiB", "12MiB", "16MiB"):
                torch_uvm.set_budget(budget)
            assert calls == 1, calls
            for tensor in kept:
                tensor.add_(1)
            torch_uvm.set_budget("8MiB")
            assert calls == 1, calls
        """)

    def test_an_invalid_one_fails_the_import(self, spawn: Spawn) -> None:
        done = spawn("import torch_uvm", env={**EMU, "TORCH_UVM_CONF": "budget:lots,limit:1GiB"}, check=False)
        assert done.returncode == 1
        for part in ("TORCH_UVM_CONF", "budget", "lots", "auto, none, bytes such as 20GiB"):
            assert part in done.stderr


class TestWhatIsInForce:
    """Getters, and messages if less is in force than was requested."""

    def test_limits(self) -> None:
        torch_uvm.enable(limit="96MiB", host_limit="80MiB")
        assert (torch_uvm.memory.get_limit(), torch_uvm.memory.get_host_limit()) == (96 * MIB, 80 * MIB)
        torch_uvm.enable()
        assert (torch_uvm.memory.get_limit(), torch_uvm.memory.get_host_limit()) == (96 * MIB, 80 * MIB)
        torch_uvm.set_limit(None)
        torch_uvm.set_host_limit(7 * MIB)
        assert (torch_uvm.memory.get_limit(), torch_uvm.memory.get_host_limit()) == (None, 7 * MIB)
        torch_uvm.set_host_limit(None)
        assert torch_uvm.memory.get_host_limit() is None

    def test_budgets(self, look: Run) -> None:
        look(
            """
assert torch_uvm.get_budget() is None
torch_uvm.set_budget("8MiB", device=1)
assert [torch_uvm.get_budget(i) for i in (None, 0, 1, "emu:1")] == [None, None, 8 * MIB, 8 * MIB]
torch_uvm.enable(budget="25%")
assert _C.budget(0) is None  # before the first managed allocation
assert [torch_uvm.get_budget(i) for i in range(2)] == [16 * MIB] * 2
use(0), use(1)
assert [torch_uvm.get_budget(i) for i in range(2)] == [16 * MIB] * 2 == [_C.budget(i) for i in range(2)]
torch_uvm.set_budget("auto")
assert torch_uvm.get_budget() == _C.budget(0) == 60 * MIB
with torch.emu.device(1):
    torch_uvm.set_budget("12MiB", device=1)
    assert torch_uvm.get_budget() == 12 * MIB
torch_uvm.set_budget(None)
assert torch_uvm.get_budget(1) is None
""",
            env={**EMU, "TORCH_UVM_CONF": "emulated_devices:2,emulated_memory:64MiB"},
        )

    @pytest.mark.parametrize(
        "before",
        ["pass", "use(); torch_uvm.set_budget('64MiB'); use()"],
        ids=["before", "after the first allocation"],
    )
    def test_a_budget_above_the_devices_memory_is_logged(self, look: Run, before: str) -> None:
        look(
            f"""
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    {before}
    assert said == [], said[0].message
    torch_uvm.set_budget("300MiB")
    torch_uvm.enable()
    x = torch.ones(4, device="emu")
(only,) = said
assert only.category is UserWarning
assert "the budget of device 0 is 64.00 MiB" in str(only.message), only.message
assert "300.00 MiB were asked for" in str(only.message), only.message
assert torch_uvm.get_budget() == 64 * MIB
""",
            env={**EMU, "TORCH_UVM_CONF": "emulated_memory:64MiB"},
        )

    @pytest.mark.parametrize(("budget", "meant"), [(4, "4GiB"), ("20", "20GiB"), (1023 * 1024, "20GiB")])
    def test_a_budget_without_a_unit_is_warned_of(self, budget: int | str, meant: str) -> None:
        for call in (torch_uvm.set_budget, torch_uvm.enable):
            with pytest.warns(UserWarning, match=f"budget .*{meant}"):
                call(budget=budget)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for enough in (MIB, "1MiB", "0.1%", "auto", None):
                torch_uvm.set_budget(enough)

    def test_a_budget_of_the_environment_without_a_unit_is_warned_of(self, spawn: Spawn) -> None:
        done = spawn("import torch_uvm", env={**EMU, "TORCH_UVM_CONF": "budget:20"})
        assert "TORCH_UVM_CONF: budget 20 is 20 B; did you mean 20GiB?" in done.stderr

    def test_a_budget_of_the_command_line_without_a_unit_is_warned_of(
        self, spawn: Spawn, tmp_path: Path
    ) -> None:
        (tmp_path / "script.py").write_text("print('ran')")
        done = spawn(args=["-m", "torch_uvm", "run", "--budget", "20", "script.py"], env=EMU)
        assert done.stdout == "ran\n"
        assert done.stderr == "python -m torch_uvm run: warning: budget 20 is 20 B; did you mean 20GiB?\n"


class TestCommandLine:
    @pytest.mark.parametrize(
        ("options", "budget", "host"),
        [
            (["--budget", "8MiB"], 8 * MIB, "auto"),
            (["--budget=25%", "--host-limit", "1GiB"], 16 * MIB, "1GiB"),
            (["--budget", "none", "--host-limit", "none"], None, "none"),
            (["--budget", "auto", "--limit", "none"], 60 * MIB, "auto"),
            (["--limit", "40MiB", "--budget", "auto"], 40 * MIB, "auto"),
            ([], 8 * MIB, "auto"),
        ],
    )
    def test_run(
        self, spawn: Spawn, tmp_path: Path, options: list[str], budget: int | None, host: str
    ) -> None:
        """The command line takes precedence over the environment, which sets 8 MiB."""
        (tmp_path / "script.py").write_text(
            """
import json, sys, torch
made = torch.ones(4, device="emu")
import torch_uvm
values = {option["key"]: option["value"] for option in torch_uvm._C.describe_options()}
print(json.dumps([torch_uvm._C.budget(0), values["host_limit"], sys.argv[1:]]))
"""
        )
        done = spawn(
            args=["-m", "torch_uvm", "run", *options, "script.py", "--budget", "x"],
            env={**EMU, "TORCH_UVM_CONF": "budget:8MiB,emulated_memory:64MiB,limit:60MiB"},
        )
        assert json.loads(done.stdout) == [budget, host, ["--budget", "x"]]
        assert ("the driver moves pages by faults" in done.stderr) == (budget is None)

    def test_info(self, spawn: Spawn) -> None:
        conf = {**EMU, "TORCH_UVM_CONF": "budget:8MiB,host_limit:2GiB"}
        facts = json.loads(spawn(args=["-m", "torch_uvm", "info", "--json"], env=conf).stdout)
        assert facts["host_limit"] == 2 * 1024**3
        assert (facts["devices"][0]["budget"], facts["devices"][0]["budget_bytes"]) == ("8MiB", None)
        text = spawn(args=["-m", "torch_uvm", "info"], env=conf).stdout
        assert re.search(r"^host_limit +2.00 GiB$", text, re.M) and re.search(r"^  budget +8MiB$", text, re.M)


@pytest.fixture(autouse=True)
def no_request_afterwards() -> Iterator[None]:
    yield
    gc.collect()
    _C.request_budget(None, None)
    assert asked() is None
