"""Out-of-memory errors: requested bytes, pinned bytes and remedies; a program that retries after one."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _spawn import Spawn
from torch import nn

import torch_uvm
from torch_uvm import _C
from torch_uvm._patches import oom_hint

MIB = 1 << 20
EMU = {"TORCH_UVM_DEVICE": "emu"}


def managed(mib: int) -> torch.Tensor:
    return torch_uvm.memory.empty(mib * MIB, dtype=torch.uint8, device="emu")


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        call()
    return str(caught.value)


def smallest_budget(message: str) -> int:
    """The budget that the message suggests, for the call and for the command line."""
    (call,) = re.findall(r'torch_uvm\.set_budget\("(\w+)"\)', message)
    assert f"The smallest budget that would do: {call} (" in message and f"run --budget {call}`" in message
    return _C.parse_bytes(call)


@pytest.fixture(autouse=True)
def nothing_is_cached() -> Iterator[None]:
    torch_uvm.memory.empty_cache()
    yield
    torch_uvm.set_host_limit(None)


class TestUnderABudget:
    """The host has no room either, or results would be created there."""

    def test_it_names_the_operator_its_need_and_the_pinned_bytes(self) -> None:
        torch_uvm.set_budget("24MiB")
        torch_uvm.set_host_limit("1MiB")
        pinned, operand = managed(16), managed(4)
        kept = torch_uvm.keep_resident(pinned)
        torch_uvm.enable()
        message = refusal(lambda: operand.repeat(2))
        assert message.startswith("out of memory: 8.00 MiB (8388608 bytes) for device 0. The budget of")
        assert "The operator aten::repeat needs 12.00 MiB on the device: 4.00 MiB of operands" in message
        assert "Pinned there by keep_resident, exports and graph captures: 16.00 MiB." in message
        assert "Where the bytes are:\n" in message
        enough = smallest_budget(message)
        assert 28 * MIB <= enough <= 30 * MIB
        torch_uvm.set_budget(enough)
        assert operand.repeat(2).numel() == 8 * MIB
        kept.release()

    @pytest.mark.parametrize("pinned", [6, 12, 20])
    def test_the_named_budget_is_the_smallest(self, pinned: int) -> None:
        budget = 24 * MIB
        torch_uvm.set_budget(budget)
        torch_uvm.set_host_limit("1MiB")
        kept = torch_uvm.keep_resident(held := managed(pinned))
        enough = smallest_budget(refusal(lambda: managed(24)))
        for less, fits in ((2 * MIB, False), (0, True)):
            torch_uvm.set_budget(enough - less)
            if fits:
                managed(24)
            else:
                assert smallest_budget(refusal(lambda: managed(24))) == enough
        kept.release()
        assert held.numel()

    def test_a_factory_is_named_too(self) -> None:
        torch_uvm.set_budget("24MiB")
        torch_uvm.set_host_limit("1MiB")
        kept = torch_uvm.keep_resident(managed(16))
        torch_uvm.enable()
        message = refusal(lambda: torch.empty(16 * MIB, dtype=torch.uint8, device="emu"))
        assert "The operator aten::empty" in message and "needs 16.00 MiB on the device" in message
        kept.release()

    @pytest.mark.parametrize("smallest", ["256KiB", "1MiB"])
    def test_tensors_that_are_too_small_to_be_moved_are_counted(self, smallest: str) -> None:
        _C.set_option("relocation_min", smallest)
        torch_uvm.set_budget("24MiB")
        torch_uvm.set_host_limit("1MiB")
        small = [torch_uvm.memory.empty(200 << 10, dtype=torch.uint8, device="emu") for _ in range(100)]
        try:
            message = refusal(lambda: managed(8))
        finally:
            _C.set_option("relocation_min", "256KiB")
        below, bytes_of_small = _C.format_bytes(_C.parse_bytes(smallest)), _C.format_bytes(100 * 200 << 10)
        assert f"Below {below}, or made by operators that still run: {bytes_of_small}" in message
        torch_uvm.set_budget(smallest_budget(message))
        assert managed(8).numel() and len(small) == 100

    def test_at_the_host_limit_it_names_the_limit_and_the_remedy(self) -> None:
        torch_uvm.set_budget("24MiB")
        torch_uvm.set_host_limit("64MiB")
        kept: list[Any] = []

        def fill() -> None:
            for _ in range(40):
                kept.append(managed(4))

        message = refusal(fill)
        assert "Nothing more can leave the device: pinned host memory is at its limit" in message
        pinned = torch_uvm.stats()["host_bytes"]
        assert f"{_C.format_bytes(pinned)} of 64.00 MiB" in message and pinned > 0
        for remedy in ("torch_uvm.set_host_limit(...)", "run --host-limit", "TORCH_UVM_CONF=host_limit:"):
            assert remedy in message
        enough = smallest_budget(message)
        torch_uvm.set_budget(enough)
        kept.append(managed(4))
        refusal(fill)
        torch_uvm.set_host_limit("512MiB")
        fill()

    def test_a_host_limit_includes_cached_memory(self) -> None:
        torch_uvm.set_budget("24MiB")
        torch_uvm.set_host_limit("512MiB")
        kept = [managed(4) for _ in range(40)]
        assert torch_uvm.stats()["host_bytes"] >= 136 * MIB
        kept.clear()
        torch_uvm.set_host_limit("64MiB")
        assert torch_uvm.stats()["host_bytes"] == 0
        refusal(lambda: kept.extend(managed(4) for _ in range(40)))
        assert torch_uvm.stats()["host_bytes"] <= 64 * MIB

    def test_at_the_limit_it_names_the_remedy(self) -> None:
        torch_uvm.set_limit(torch_uvm.memory.memory_reserved() + 8 * MIB)
        message = refusal(lambda: managed(64))
        for remedy in ("managed memory limit", "torch_uvm.set_limit(...)", "run --limit", "conf=limit:"):
            assert remedy.lower() in message.lower()


class TestUnderALimit:
    def test_retried_with_smaller_batches(self) -> None:
        torch_uvm.enable(limit="40MiB")
        layer: Any = nn.Linear(256, 256).to("emu")
        batch, failures = 1 << 17, 0
        while True:
            try:
                layer(torch.ones(batch, 256, device="emu")).sum().backward()
                break
            except torch.OutOfMemoryError:
                failures += 1
                batch //= 2
        assert failures >= 2
        assert torch.equal(layer.bias.grad.cpu(), torch.full((256,), float(batch)))


class TestWithoutManagedMemory:
    def test_plain_memory_of_emu_names_the_command(self) -> None:
        total = _C.device_properties(0)["total_memory"]
        message = refusal(lambda: torch.empty(2 * total, dtype=torch.uint8, device="emu"))
        assert message.startswith("out of memory: ") and message.endswith(oom_hint.HINT)
        assert "python -m torch_uvm run SCRIPT" in message
        torch_uvm.enable(budget=None)
        torch_uvm.set_limit(torch_uvm.memory.memory_reserved() + MIB)
        assert oom_hint.HINT not in refusal(lambda: managed(8))

    @pytest.mark.parametrize(
        ("error", "switch", "said"),
        [
            ("torch.OutOfMemoryError", "0", True),
            ("torch.OutOfMemoryError", "1", False),
            ("RuntimeError", "0", False),
        ],
    )
    def test_pytorchs_own_errors_end_with_the_hint(
        self, spawn: Spawn, error: str, switch: str, said: bool
    ) -> None:
        """CUDA's allocator is PyTorch's: its error message is unchanged, and the hint is printed at the
        end."""
        text = "CUDA out of memory. Tried to allocate 2.00 GiB."
        done = spawn(
            f"""
            import torch, torch_uvm
            try:
                raise {error}({text!r})
            except RuntimeError as error:  # a program that catches the error sees no difference
                assert str(error) == {text!r} and not hasattr(error, "__notes__")
                raise
            """,
            env={**EMU, "TORCH_UVM": switch},
            check=False,
        )
        assert done.returncode == 1
        lines = done.stderr.splitlines()
        assert f"{error}: {text}" in lines
        assert (lines[-1] == oom_hint.HINT) is said

    def test_the_hook_calls_the_previous_one(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        class Old(torch.OutOfMemoryError):
            add_note = None  # type: ignore[assignment]  # as in Python 3.10

        seen: list[Any] = []
        monkeypatch.setattr(sys, "excepthook", lambda *args: seen.append(args))
        oom_hint.hint_at_the_end()
        for error, said in ((ValueError("x"), ""), (Old("y"), f"{oom_hint.HINT}\n")):
            sys.excepthook(type(error), error, None)
            assert capsys.readouterr().err == said
        assert [kind for kind, _, _ in seen] == [ValueError, Old]
