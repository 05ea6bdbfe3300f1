"""Under a budget: what stays in spite of it, steps, statistics, recordings, addresses that leave PyTorch."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _spawn import Spawn

import torch_uvm
from torch_uvm import _C

MIB = 1024**2
EMU = {"TORCH_UVM_DEVICE": "emu"}
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


_some = random.Random(0)


def press(rounds: int = 2) -> None:
    """Uses three times the budget, over and over, so that what may leave the device leaves it.

    Never the same way twice: by a plan that an earlier test has left, room may come from what the plan knows.
    """
    others = [torch.ones(MIB // 2, device="emu") for _ in range(3 * SMALL // (2 * MIB))]
    for _ in range(rounds):
        for other in others:
            _some.choice((other.add_, other.sub_, other.mul_, other.div_))(1)


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

    def test_peaks_are_reset_with_those_of_all_memory(self, budget: int) -> None:
        device = torch.device("emu", 0)
        press()
        torch_uvm.empty_cache()
        before = torch_uvm.residency_stats()
        assert before["peak_device_bytes"][device] > before["device_bytes"][device]
        torch_uvm.reset_residency_stats()
        assert torch_uvm.residency_stats()["peak_device_bytes"] == before["peak_device_bytes"]
        torch_uvm.reset_peak_memory_stats()
        assert torch_uvm.residency_stats()["peak_device_bytes"] == before["device_bytes"]

    def test_without_a_budget_ever(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch_uvm
            stats = torch_uvm.residency_stats()
            torch_uvm.ones(4, device="emu:0")
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
            with pytest.raises(RuntimeError, match="is active"):
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

    def test_it_leaves_again_when_the_cpus_label_is_gone(self, budget: int) -> None:
        """What was written through that label leaves with it, though there was a clean copy from before."""

        def moves() -> bool:
            address = x.data_ptr()
            for _ in range(5):
                press()
                if x.data_ptr() != address:
                    return True
            return False

        x = torch.full((MIB // 2,), 3.0, device="emu")
        assert moves()
        x.sum()
        on_cpu = torch_uvm.to(x, "cpu")
        x += 1
        assert not moves()
        torch.accelerator.synchronize()
        on_cpu *= 2
        array = on_cpu[:8].numpy()
        del on_cpu
        assert not moves()
        del array
        assert moves()
        assert (x == 8.0).all().item()
        x += 1
        assert moves()
        y = torch_uvm.to(x, "cpu")
        assert (y == 9.0).all() and y.data_ptr() == x.data_ptr()
        with pytest.raises(RuntimeError, match="resize"):
            x.resize_(MIB)
        del y
        assert x.resize_(MIB).shape == (MIB,) and (x[: MIB // 2] == 9.0).all().item()

    def test_what_has_the_cpus_label_alone_is_not_waited_for(self, budget: int) -> None:
        """The storage that was on the device is gone, and its bytes are not."""
        x = torch.full((MIB // 2,), 3.0, device="emu")
        x += 1
        before = torch_uvm.residency_stats()["records"]
        on_cpu = torch_uvm.to(x, "cpu").detach()
        del x
        assert torch_uvm.residency_stats()["records"] == before - 1
        torch.accelerator.synchronize()
        assert (on_cpu == 4.0).all()
        press()
        back = torch_uvm.to(on_cpu, "emu")
        back += 1
        press()
        assert (back == 5.0).all().item() and back.data_ptr() == on_cpu.data_ptr()

    def test_the_c_interface_of_dlpack_is_not_offered(self, budget: int) -> None:
        assert not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")

    def test_compiled_code_takes_addresses_as_before(self, budget: int) -> None:
        def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + 1 if a.data_ptr() == b.data_ptr() else a * 5

        compiled = torch.compile(same, backend="eager", fullgraph=True)
        x = torch.ones(3)
        assert torch.equal(compiled(x, x), same(x, x))


def _floats(address: int) -> Any:
    return ctypes.cast(address, ctypes.POINTER(ctypes.c_float))


class TestEvictingAfterOperators:
    """What tests over whole tables of operators rest on."""

    @pytest.mark.usefixtures("evicting")
    def test_everything_leaves(self) -> None:
        x = torch.ones(3, device="emu")
        y = x + 1
        for tensor in (x, y):
            assert torch_uvm.residency(tensor) == {torch.device("cpu"): 12}
        kept = torch_uvm.keep_resident(x)
        address = x.data_ptr()
        y.add_(x)
        assert x.data_ptr() == address and is_on_device_of(x, 12)
        kept.release()
        assert y.tolist() == [3, 3, 3]

    def test_small_tensors_stay_without_it(self, budget: int) -> None:
        x = torch.ones(3, device="emu")
        press()
        assert is_on_device_of(x, 12)


def is_on_device_of(x: torch.Tensor, size: int) -> bool:
    return torch_uvm.residency(x) == {torch.device("emu:0"): size}
