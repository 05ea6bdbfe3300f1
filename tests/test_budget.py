"""Budgets: how they are asked for, when they hold, who has the last word; what stays in spite of them."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _spawn import Spawn

import torch_uvm
from torch_uvm import _C, exits

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
            ("none", ValueError),  # spelled None, as limits are
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
            for accepted in ("4096", "'80%'", '"auto" or None'):
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
    return torch_uvm.ones(4, device=f"emu:{device}")
"""


class TestPrecedence:
    def test_nobody_asked(self, spawn: Spawn) -> None:
        spawn(
            LOOK
            + """
use()
assert _C.requested_budget(0) is None and _C.budget(0) is None
assert "data_ptr" not in vars(torch.Tensor) and not torch_uvm.exits._watching  # nothing was put in place
torch_uvm.enable()
assert _C.requested_budget(0) == "auto" and "data_ptr" in vars(torch.Tensor)
torch_uvm.disable()
torch_uvm.set_budget(None)
torch_uvm.enable()
assert _C.requested_budget(0) == "none"
with torch_uvm.enabled():
    assert _C.requested_budget(0) == "none" and _C.budget(0) is None
""",
            env=EMU,
        )

    def test_a_scope_asks_for_the_default_too(self, spawn: Spawn) -> None:
        spawn(
            LOOK
            + """
with torch_uvm.disabled():
    assert _C.requested_budget(0) is None
with torch_uvm.enabled():
    assert _C.requested_budget(0) == "auto"
""",
            env=EMU,
        )

    @pytest.mark.parametrize("switch", ["0", "1"])
    def test_the_environments_stays_until_somebody_asks(self, spawn: Spawn, switch: str) -> None:
        spawn(
            LOOK
            + """
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

    def test_of_single_devices(self, spawn: Spawn) -> None:
        spawn(
            LOOK
            + """
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

    def test_a_device_that_was_not_used_is_not_asked(self, spawn: Spawn) -> None:
        spawn(
            LOOK
            + """
torch_uvm.set_budget("50%")
assert _C.budget(0) is None and not _C.in_use()
torch_uvm.emulated.configure(devices=2, memory="32MiB")
use(0)
assert (_C.budget(0), _C.budget(1)) == (16 * MIB, None)
use(1)
assert _C.budget(1) == 16 * MIB
torch_uvm.set_budget("1GiB")
assert _C.budget(0) == 32 * MIB  # no more than it has
""",
            env=EMU,
        )

    def test_auto_is_what_is_free_less_a_reserve(self, spawn: Spawn) -> None:
        spawn(
            LOOK
            + """
plain = torch.ones(4, MIB, device="emu:0")  # 16 MiB that are not managed
torch_uvm.enable()
torch.ones(4, device="emu:0")
assert _C.budget(0) == (64 - 16 - 4) * MIB, _C.budget(0)
del plain
torch.emu.empty_cache()
torch_uvm.enable()
assert _C.budget(0) == 44 * MIB  # measured when somebody asks
torch_uvm.enable(budget="auto")
assert _C.budget(0) == 60 * MIB, _C.budget(0)
""",
            env={**EMU, "TORCH_UVM_CONF": "emulated_memory:64MiB"},
        )

    def test_a_wrong_one_fails_the_import(self, spawn: Spawn) -> None:
        done = spawn("import torch_uvm", env={**EMU, "TORCH_UVM_CONF": "budget:lots,limit:1GiB"}, check=False)
        assert done.returncode == 1
        for part in ("TORCH_UVM_CONF", "budget", "lots", "auto, none, bytes such as 20GiB"):
            assert part in done.stderr


class TestCommandLine:
    @pytest.mark.parametrize(
        ("options", "budget", "host"),
        [
            (["--budget", "8MiB"], 8 * MIB, "none"),
            (["--budget=25%", "--host-limit", "1GiB"], 16 * MIB, "1GiB"),
            (["--budget", "none"], None, "none"),
            (["--budget", "auto"], 60 * MIB, "none"),
            ([], 8 * MIB, "none"),
        ],
    )
    def test_run(
        self, spawn: Spawn, tmp_path: Path, options: list[str], budget: int | None, host: str
    ) -> None:
        """The environment says 8 MiB: what the command line says counts more."""
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
            env={**EMU, "TORCH_UVM_CONF": "budget:8MiB,emulated_memory:64MiB"},
        )
        assert json.loads(done.stdout) == [budget, host, ["--budget", "x"]]

    def test_info(self, spawn: Spawn) -> None:
        conf = {**EMU, "TORCH_UVM_CONF": "budget:8MiB,host_limit:2GiB"}
        facts = json.loads(spawn(args=["-m", "torch_uvm", "info", "--json"], env=conf).stdout)
        assert facts["host_limit"] == 2 * 1024**3
        assert (facts["devices"][0]["budget"], facts["devices"][0]["budget_bytes"]) == ("8MiB", None)
        text = spawn(args=["-m", "torch_uvm", "info"], env=conf).stdout
        assert "host limit      2.00 GiB" in text and "  budget                    8MiB\n" in text


# --- under a budget

SMALL = 8 * MIB


@pytest.fixture
def budget() -> int:
    """A hard budget, on a device that is 256 MiB, with managed memory on."""
    torch_uvm.empty_cache()
    torch_uvm.enable(budget=SMALL)
    torch_uvm.empty_cache()
    torch_uvm.reset_peak_memory_stats()
    torch_uvm.reset_residency_stats()
    return SMALL


def press(rounds: int = 2) -> None:
    """Uses three times the budget, over and over, so that what may leave the device leaves it."""
    others = [torch.ones(MIB // 2, device="emu") for _ in range(3 * SMALL // (2 * MIB))]
    for _ in range(rounds):
        for other in others:
            other += 1


def is_on_device(x: torch.Tensor) -> bool:
    return torch_uvm.residency(x) == {torch.device("emu:0"): x.untyped_storage().nbytes()}


def leaves(x: torch.Tensor) -> bool:
    """Whether it leaves the device when others need the room; which goes first is the engine's choice."""
    for _ in range(5):
        press()
        if not is_on_device(x):
            return True
    return False


class TestKeeping:
    def test_what_is_not_kept_leaves(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        assert leaves(x)
        assert torch_uvm.residency_stats()["written_back"]["count"] > 0
        assert (x == 3.0).all().item()

    def test_kept_tensors_stay_where_they_are(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        press()
        kept = torch_uvm.keep_resident(x)
        assert is_on_device(x)
        address = x.data_ptr()
        press()
        assert x.data_ptr() == address and is_on_device(x)
        kept.release()
        assert leaves(x)
        kept.release()  # does nothing
        assert (x == 3.0).all().item()

    def test_holds_nest(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        first, second = torch_uvm.keep_resident(x), torch_uvm.keep_resident([x, {"a": x.view(-1, 2)[3:]}])
        with torch_uvm.resident(x):
            first.release()
            press()
            assert is_on_device(x)
        press()
        assert is_on_device(x)
        second.release()
        assert leaves(x)

    def test_takes_modules_and_optimizers(self, budget: int) -> None:
        model = torch.nn.Linear(512, 1024).to("emu")  # 2 MiB
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        model(torch.ones(2, 512, device="emu")).sum().backward()
        optimizer.step()
        state = optimizer.state[model.weight]["momentum_buffer"]
        with torch_uvm.resident((model, [optimizer])):
            press()
            assert is_on_device(model.weight) and is_on_device(state)
        assert leaves(model.weight) and leaves(state)

    def test_a_scope_ends_with_an_exception_and_can_be_entered_again(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        scope = torch_uvm.resident(x)
        for _ in range(2):
            with pytest.raises(KeyError), scope, scope:
                raise KeyError
            assert leaves(x)
        with pytest.raises(RuntimeError, match="not open"):
            scope.__exit__(None, None, None)

    def test_decorates(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")

        @torch_uvm.resident(x)
        def body() -> bool:
            press()
            return is_on_device(x)

        assert body() and body()

    def test_a_scope_of_several_threads(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        scope = torch_uvm.resident(x)
        failures: list[BaseException] = []
        inside = threading.Barrier(4)

        def enter() -> None:
            try:
                for _ in range(50):
                    with scope:
                        pass
                inside.wait()
                with scope:
                    address = x.data_ptr()
                    for _ in range(20):
                        x.sum()
                        assert x.data_ptr() == address
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=enter) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert leaves(x)

    def test_dropped_handles_hold_until_the_tensor_is_freed(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        torch_uvm.keep_resident(x)
        gc.collect()
        press()
        assert is_on_device(x)
        torch_uvm.keep_resident([torch.ones(MIB // 2, device="emu") for _ in range(2)])
        torch.ones(2, MIB // 2, device="emu").sum()  # 4 MiB and a little: only if the two are gone

    @pytest.mark.parametrize("keep", [torch_uvm.keep_resident, torch_uvm.resident])
    def test_bad_input(self, keep: Any) -> None:
        with pytest.raises(TypeError, match=r"x\[1\]\['a'\] is 3 \(int\)"):
            keep([torch.ones(2), {"a": 3}])
        with pytest.raises(ValueError, match="not managed"):
            keep(torch.ones(2))
        keep([torch.ones(2)])  # nothing to keep is no error

    def test_without_a_budget(self) -> None:
        torch_uvm.set_budget(None)
        x = torch_uvm.ones(4)
        with torch_uvm.resident(x):
            torch_uvm.keep_resident(x).release()
        torch_uvm.step()


class TestSteps:
    @pytest.fixture
    def marks(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        marks: list[str] = []
        monkeypatch.setattr(_C, "mark_step", lambda: marks.append(threading.current_thread().name))
        return marks

    def test_optimizers_mark_them(self, budget: int, marks: list[str]) -> None:
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            optimizer.step()
        torch_uvm.enable(budget="9MiB")  # and once only
        optimizer.step()
        assert len(marks) == 4

    def test_users_mark_them(self, marks: list[str]) -> None:
        torch_uvm.step()
        assert len(marks) == 1

    def test_compiled_optimizers_run_as_before(self, budget: int, marks: list[str]) -> None:
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(torch.ones(1, 3)).sum().backward()
        before = model.bias.detach().clone()
        torch.compile(lambda: optimizer.step(), backend="eager")()
        assert torch.equal(model.bias, before - 0.5)


class TestStatistics:
    def test_keys(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        press()
        x.sum()
        stats = torch_uvm.residency_stats()
        for what in ("fetched", "written_back", "dropped_clean", "used_in_place", "waited"):
            assert stats[what].keys() == {"count", "bytes", "ms"}, what
        device = torch.device("emu", 0)
        assert stats["fetched"]["bytes"] > 0 and stats["written_back"]["bytes"] > 0
        assert 0 < stats["device_bytes"][device] <= stats["peak_device_bytes"][device] <= budget
        assert stats["host_bytes"] > 0 and stats["over_budget"] == 0
        assert stats["plan_hits"] + stats["plan_misses"] > 0

    def test_reset(self, budget: int) -> None:
        press()
        torch_uvm.reset_residency_stats()
        stats = torch_uvm.residency_stats()
        assert stats["written_back"] == {"count": 0, "bytes": 0, "ms": 0.0}
        assert stats["plan_hits"] == stats["plan_misses"] == 0

    def test_without_a_budget_ever(self, spawn: Spawn) -> None:
        spawn(
            LOOK
            + """
stats = torch_uvm.residency_stats()
use()
torch_uvm.reset_residency_stats()
assert stats["fetched"] == {"count": 0, "bytes": 0, "ms": 0.0} and stats["host_bytes"] == 0
assert not any(stats["device_bytes"].values())
""",
            env=EMU,
        )


class TestRecording:
    def test_is_read_back(self, budget: int, tmp_path: Path) -> None:
        from torch_uvm import traces

        path = tmp_path / "accesses.jsonl"
        x = torch.full((MIB // 2,), 3.0, device="emu")
        with torch_uvm.record_accesses(path) as recording:
            assert str(path) in repr(recording)
            press()
            x.sum()
            torch_uvm.step()
        recording.stop()  # did already
        size = path.stat().st_size
        press()
        assert path.stat().st_size == size > 0
        assert traces.read_trace(path).operators

    def test_one_at_a_time(self, budget: int, tmp_path: Path) -> None:
        with torch_uvm.record_accesses(str(tmp_path / "a")):
            with pytest.raises(RuntimeError, match="going on"):
                torch_uvm.record_accesses(tmp_path / "b")
        assert not (tmp_path / "b").exists()
        torch_uvm.record_accesses(tmp_path / "b").stop()

    def test_bad_paths(self, tmp_path: Path) -> None:
        record: Any = torch_uvm.record_accesses
        with pytest.raises(TypeError, match=r"path is 3 \(int\)"):
            record(3)
        with pytest.raises(IsADirectoryError, match="is a folder"):
            record(tmp_path)
        with pytest.raises(FileNotFoundError, match="no folder"):
            record(tmp_path / "none" / "a")
        assert list(tmp_path.iterdir()) == []

    def test_is_complete_when_the_process_exits(self, spawn: Spawn, tmp_path: Path) -> None:
        spawn(
            """
            import os, torch, torch_uvm
            torch_uvm.enable(budget="8MiB")
            torch_uvm.record_accesses("at_exit.jsonl")
            os.chdir("/")
            x = [torch.ones(1 << 18, device="emu") + 1 for _ in range(4)]
            """,
            env=EMU,
        )
        from torch_uvm import traces

        assert traces.read_trace(tmp_path / "at_exit.jsonl").operators


class TestExits:
    @pytest.fixture
    def settled(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """What was settled; that it works is tested below."""
        settled: list[str] = []
        plain, plain_storage = _C.settle, _C.settle_storage

        def settle(x: torch.Tensor) -> None:
            settled.append("tensor")
            plain(x)

        def settle_storage(x: torch.UntypedStorage) -> None:
            settled.append("storage")
            plain_storage(x)

        monkeypatch.setattr(_C, "settle", settle)
        monkeypatch.setattr(_C, "settle_storage", settle_storage)
        return settled

    def test_bare_addresses_are_settled(self, budget: int, settled: list[str]) -> None:
        x = torch.ones(MIB // 2, device="emu")
        y = torch_uvm.to(x, "cpu")
        for give in (
            lambda: x.data_ptr(),
            lambda: torch.nn.Parameter(x).data_ptr(),
            lambda: y.numpy(),
            lambda: np.asarray(y),
        ):
            settled.clear()
            give()
            assert settled == ["tensor"]
        settled.clear()
        assert x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        assert settled == ["storage"] * 2

    def test_what_is_not_managed_is_left_alone(self, budget: int, settled: list[str]) -> None:
        x = torch.ones(4)
        x.data_ptr(), x.numpy(), x.untyped_storage().data_ptr()
        with torch_uvm.disabled():
            torch.ones(4, device="emu").data_ptr()
        torch.empty(4, device="meta").data_ptr()
        assert settled == []
        with pytest.raises(RuntimeError, match="requires grad"):
            torch.nn.Parameter(x).numpy()

    def test_signatures_stay(self, budget: int) -> None:
        assert torch.Tensor.data_ptr.__name__ == "data_ptr" and "address" in (
            torch.Tensor.data_ptr.__doc__ or ""
        )
        with pytest.raises(TypeError):
            torch.ones(1).data_ptr(3)  # type: ignore[call-arg]

    def test_an_address_has_the_bytes(self, budget: int) -> None:
        """Also of what is on its way at that moment."""
        x = torch.full((MIB // 2,), 3.0, device="emu")
        for _ in range(3):
            press(1)
            seen = np.ctypeslib.as_array(_floats(x.data_ptr()), (MIB // 2,))
            assert (seen == 3.0).all()
            x.add_(0.0)

    def test_storages_keep_their_identities(self, budget: int) -> None:
        """Many programs compare addresses to find tied weights; more of them than the budget has room for."""
        kept = [torch.full((MIB // 2,), float(i), device="emu") for i in range(12)]
        first = [x.untyped_storage().data_ptr() for x in kept]
        assert len(set(first)) == len(kept)
        assert [x.untyped_storage().data_ptr() for x in kept] == first

    def test_an_identity_does_not_pin(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        x.untyped_storage().data_ptr(), x.data_ptr()
        assert leaves(x)

    @pytest.mark.parametrize(
        "export",
        [
            lambda x: x.__dlpack__(),
            lambda x: x.__dlpack__(max_version=(1, 0)),
            lambda x: x.__dlpack__(dl_device=(13, 0)),
            lambda x: vars(torch.utils.dlpack)["to_dlpack"](x),  # which the stubs forget
        ],
        ids=["unversioned", "versioned", "managed", "to_dlpack"],
    )
    def test_an_export_holds_until_it_is_gone(self, budget: int, export: Any) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        exported = export(x)
        assert is_on_device(x)
        address = x.data_ptr()
        press()
        assert is_on_device(x) and x.data_ptr() == address
        del exported
        gc.collect()
        assert leaves(x)

    def test_what_comes_back_is_a_tensor_like_others(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        back = torch_uvm.from_dlpack(x)
        assert leaves(x)
        assert back.data_ptr() == x.data_ptr() and torch.equal(back, x)

    def test_a_failed_export_holds_nothing(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu", requires_grad=True)
        with pytest.raises(BufferError):
            x.__dlpack__()
        with pytest.raises((BufferError, TypeError)):
            x.detach().__dlpack__(stream="x")
        assert leaves(x)

    def test_numpy_under_the_cpus_label_sees_what_the_device_writes(self, budget: int) -> None:
        x = torch.full((MIB // 2,), 3.0, device="emu")
        press()
        array = torch_uvm.to(x, "cpu").numpy()
        for value in (4.0, 5.0):
            press()
            assert (array == value - 1).all()
            x += 1
            torch.accelerator.synchronize()
            assert (array == value).all()
        array[:] = 9.0
        press()
        assert (x == 9.0).all().item()

    def test_the_c_interface_of_dlpack_is_not_offered(self, budget: int) -> None:
        assert not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")

    def test_compiled_code_takes_addresses_as_before(self, budget: int) -> None:
        def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + 1 if a.data_ptr() == b.data_ptr() else a * 5

        compiled = torch.compile(same, backend="eager", fullgraph=True)
        x = torch.ones(3)
        assert torch.equal(compiled(x, x), same(x, x))


def _floats(address: int) -> Any:
    import ctypes

    return ctypes.cast(address, ctypes.POINTER(ctypes.c_float))


@pytest.fixture(autouse=True)
def nobody_has_asked() -> Iterator[None]:
    yield
    gc.collect()
    _C.request_budget(None, None)
    assert exits._watching or asked() is None
