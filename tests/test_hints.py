"""Prefetch, advise, discard and residency: what each does to pages, and that none changes a result."""

# torch has no stub for what torch.emu adds; wrong arguments are the point of some tests.
# mypy: disable-error-code="arg-type, attr-defined"

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _spawn import Spawn
from torch import nn

import torch_uvm
from torch_uvm import _C, advise, discard, emulated, prefetch, residency

EMU = torch.device("emu:0")
CPU = torch.device("cpu")
PAGE = 65536
MIB = 2**20


def calls(name: str) -> int:
    return emulated.counters()[f"{name}_calls"]


def attributes(t: torch.Tensor) -> dict[str, Any]:
    """Of all pages that the tensor's block has bytes in."""
    address, count, _ = _C.block_of(t) or (0, 0, 0)
    return _C.range_attributes(address, count)


def advice(t: torch.Tensor) -> tuple[Any, ...]:
    found = attributes(t)
    assert found["uniform"]
    return found["read_mostly"], found["preferred_location"], found["accessed_by"]


NO_ADVICE: tuple[Any, ...] = (False, None, [])


def home(t: torch.Tensor) -> int:
    return (_C.block_of(t) or (0, 0, -9))[2]


def on_host(count: int) -> torch.Tensor:
    """Managed bytes on the host. The emulator does not see the host's writes, so they are brought there."""
    x = torch_uvm.empty(count, dtype=torch.uint8, device="cpu").fill_(1)
    prefetch(x, "cpu")
    emulated.reset_counters()
    return x


def page_bytes() -> int:
    """What hints are rounded to: the emulator's pages are 64 KiB, a GPU's up to 2 MiB."""
    bytes_of_a_page: int = _C.device_properties(0)["page_bytes"]
    return bytes_of_a_page


def neighbours(count: int, each: int) -> list[torch.Tensor]:
    """Tensors of `each` bytes, one behind the other in one segment, resident on the device."""
    torch_uvm.empty_cache()
    made = [torch_uvm.ones(each, dtype=torch.uint8) for _ in range(12)]
    made.sort(key=torch.Tensor.data_ptr)
    starts = {s["address"] for s in torch_uvm.memory_snapshot()}
    for first in range(len(made) - count + 1):
        run = made[first : first + count]
        step = [b.data_ptr() - a.data_ptr() for a, b in zip(run, run[1:], strict=False)]
        if all(s == each for s in step) and not any(t.data_ptr() in starts for t in run[1:]):
            return run
    raise AssertionError("no neighbours")


@pytest.fixture(autouse=True)
def fresh_counters() -> None:
    torch_uvm.empty(1)  # the accelerator is made
    emulated.reset_counters()


class TestPrefetch:
    def test_moves_pages_and_no_label(self) -> None:
        x = on_host(4 * MIB)
        prefetch(x, EMU)
        assert emulated.residency(x) == residency(x) == {EMU: 4 * MIB}
        assert x.device == CPU
        prefetch(x, "cpu")
        assert emulated.residency(x) == residency(x) == {CPU: 4 * MIB}
        assert calls("prefetch") == 2
        assert bool((x == 1).all())

    def test_device_of_the_label_is_the_default(self) -> None:
        x = on_host(4 * MIB)
        y = torch_uvm.to(x, EMU)
        prefetch(y)
        assert emulated.residency(x) == {EMU: 4 * MIB}
        prefetch(x)
        assert emulated.residency(x) == {CPU: 4 * MIB}

    def test_of_a_view_moves_its_pages_alone(self) -> None:
        x = on_host(16 * PAGE)
        prefetch(x[3 * PAGE + 1 : 6 * PAGE + 1], EMU)
        assert emulated.residency(x) == {CPU: 14 * PAGE, EMU: 2 * PAGE}
        assert emulated.residency(x[4 * PAGE : 6 * PAGE]) == {EMU: 2 * PAGE}
        assert emulated.counters()["bytes_to_device"] == 2 * PAGE

    def test_of_columns_covers_gaps_smaller_than_a_page(self) -> None:
        x = on_host(16 * PAGE).view(32, PAGE // 2)
        prefetch(x[:, :16], EMU)
        assert emulated.residency(x) == {CPU: PAGE, EMU: 15 * PAGE}
        assert calls("prefetch") == 1

    def test_of_rows_leaves_gaps_of_a_page(self) -> None:
        x = on_host(16 * PAGE).view(16, PAGE)
        prefetch(x[::2], EMU)
        assert calls("prefetch") == 8
        assert emulated.residency(x[0]) == {EMU: PAGE}
        assert emulated.residency(x[1]) == {CPU: PAGE}

    def test_never_moves_a_neighbours_page(self) -> None:
        left, x, right = neighbours(3, 160 * 1024)
        before = emulated.residency(left), emulated.residency(right)
        prefetch(x, "cpu")
        moved = emulated.residency(x).get(CPU, 0)
        assert moved % PAGE == 0 and PAGE <= moved < x.nbytes
        assert (emulated.residency(left), emulated.residency(right)) == before
        assert before == ({EMU: left.nbytes}, {EMU: right.nbytes})

    def test_of_a_tensor_smaller_than_its_page_does_nothing(self) -> None:
        small = neighbours(3, 512)
        emulated.reset_counters()
        prefetch(small[1], "cpu")
        assert calls("prefetch") == 0
        assert [residency(t) for t in small] == [{EMU: 512}] * 3
        assert home(small[1]) == 0

    def test_joins_neighbours_into_one_call(self) -> None:
        run = neighbours(8, 160 * 1024)
        emulated.reset_counters()
        prefetch(run[1:7], "cpu")
        assert calls("prefetch") == 1
        inner = run[2:6]  # no page of theirs is shared with anything that was not given
        assert [emulated.residency(t) for t in inner] == [{CPU: 160 * 1024}] * 4
        assert emulated.residency(run[0]) == emulated.residency(run[7]) == {EMU: 160 * 1024}

    def test_bytes_under_two_labels_move_once(self) -> None:
        x = on_host(4 * MIB)
        prefetch([x, torch_uvm.to(x, EMU), x.view(2, -1)], "cpu")
        assert calls("prefetch") <= 2  # one of them is the move's
        emulated.reset_counters()
        prefetch([x, torch_uvm.to(x, EMU)], EMU)
        assert emulated.counters()["bytes_to_device"] <= 4 * MIB

    def test_files_the_block_where_its_pages_are(self) -> None:
        x = on_host(4 * MIB)
        prefetch(x[: 2 * MIB], EMU)
        assert home(x) == -1
        prefetch(x, EMU)
        assert home(x) == 0
        prefetch(x, "cpu")
        assert home(x) == -1
        address = x.data_ptr()
        prefetch(x, EMU)
        del x
        [segment] = [s for s in torch_uvm.memory_snapshot() if 0 <= address - s["address"] < s["total_size"]]
        [block] = [b for b in segment["blocks"] if 0 <= address - b["address"] < b["size"]]
        assert (block["state"], block["device"]) == ("inactive", 0)

    @pytest.mark.parametrize("make", [lambda x: x[:0], lambda x: x[0], lambda x: x.expand(3, -1)])
    def test_of_odd_views_is_harmless(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x = make(on_host(2 * MIB))
        for device in (EMU, CPU):
            prefetch(x, device)
            advise(x, read_mostly=True)
            advise(x, read_mostly=False)
        assert bool((x == 1).all())

    def test_waits_for_nothing(self) -> None:
        x = on_host(4 * MIB)
        prefetch(x, EMU)
        prefetch(x, "cpu")
        assert emulated.counters()["synchronisations"] == 0

    def test_what_is_not_managed_is_passed_over_inside(self) -> None:
        prefetch([torch.zeros(2**20), torch.zeros(3, device="meta"), torch.eye(3).to_sparse()], EMU)
        prefetch([], EMU)
        assert calls("prefetch") == 0


class TestContainers:
    def test_module_with_buffers_and_ties(self) -> None:
        model = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 1024))
        model[2].weight = model[0].weight
        torch_uvm.to(model, "emu", managed=True)
        assert residency(model) == {EMU: sum(t.nbytes for t in (*model.parameters(), *model.buffers()))}
        emulated.reset_counters()
        prefetch(model, "cpu")
        assert calls("prefetch") == 1  # the rest is smaller than its pages
        assert emulated.residency(model[0].weight) == {CPU: 4 * MIB}

    def test_optimizer_state(self) -> None:
        with torch_uvm.enabled():
            parameter = nn.Parameter(torch.ones(MIB, device="emu"))
            optimizer = torch.optim.AdamW([parameter])
            parameter.sum().backward()
            optimizer.step()
        state = optimizer.state[parameter]
        assert state["step"].device.type == "cpu"
        prefetch(optimizer, "cpu")
        for name in ("exp_avg", "exp_avg_sq"):
            assert emulated.residency(state[name]) == {CPU: 4 * MIB}
        assert emulated.residency(parameter) == {EMU: 4 * MIB}
        assert residency(optimizer) == {CPU: 8 * MIB + state["step"].nbytes}

    def test_optimizer_with_lists_and_numbers(self) -> None:
        with torch_uvm.enabled():
            parameter = nn.Parameter(torch.ones(MIB, device="emu"))
            optimizer = torch.optim.LBFGS([parameter], max_iter=3)

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = (parameter**2).sum()
                loss.backward()
                return loss

            optimizer.step(closure)
        assert isinstance(optimizer.state[parameter]["old_dirs"], list)
        prefetch(optimizer, "cpu")
        assert emulated.residency(optimizer.state[parameter]["d"]) == {CPU: 4 * MIB}

    def test_nested(self) -> None:
        a, b, c = (on_host(2 * MIB) for _ in range(3))
        prefetch({"a": [a, (b,)], 3: {"c": nn.ParameterList([nn.Parameter(c.float())]), "e": []}}, EMU)
        assert residency([a, b]) == {EMU: 4 * MIB}
        assert residency(c) == {CPU: 2 * MIB}

    def test_deep_and_circular(self) -> None:
        x = on_host(2 * MIB)
        circle: list[Any] = [x]
        circle.append({"again": circle})
        deep: Any = circle
        for _ in range(5000):
            deep = [deep]
        prefetch(deep, EMU)
        assert residency(x) == residency([x, x, circle]) == {EMU: 2 * MIB}


class TestAdvise:
    def test_sets_and_undoes(self) -> None:
        x = on_host(2 * MIB)
        advise(x, read_mostly=True)
        assert advice(x) == (True, None, [])
        advise(x, preferred_location="cpu")
        advise(x, accessed_by=[EMU, "cpu"])
        assert advice(x) == (True, -1, [-1, 0])
        advise(x)
        assert advice(x) == (True, -1, [-1, 0])
        advise(x, preferred_location=0, accessed_by="cpu")  # replaces
        assert advice(x) == (True, 0, [-1])
        advise(x, False, None, ())
        assert advice(x) == NO_ADVICE

    def test_makes_one_call_a_range_and_statement(self) -> None:
        x = on_host(2 * MIB)
        advise(x, read_mostly=True, preferred_location=0, accessed_by=[0, "cpu", 0])
        assert calls("advise") == 4
        advise(x, accessed_by=None)
        assert calls("advise") == 6

    def test_leaves_neighbours_alone(self) -> None:
        page = page_bytes()
        left, x, right = neighbours(3, page * 5 // 2)
        advise(x, read_mostly=True, preferred_location="cpu")
        assert not attributes(x)["uniform"]
        whole = _C.page_ranges([x], page)
        assert _C.range_attributes(*whole[0])["read_mostly"]
        assert advice(left) == advice(right) == NO_ADVICE

    def test_does_not_outlive_its_tensor(self) -> None:
        x = on_host(2 * MIB)
        address = x.data_ptr()
        advise(x, read_mostly=True, preferred_location="cpu", accessed_by=EMU)
        del x
        y = on_host(2 * MIB)
        assert y.data_ptr() == address
        assert advice(y) == NO_ADVICE

    def test_of_a_view_does_not_outlive_the_tensor(self) -> None:
        x = on_host(2 * MIB)
        y = torch_uvm.to(x, EMU)
        advise(y[PAGE : 4 * PAGE], read_mostly=True)
        advise(y[2 * PAGE : 3 * PAGE], read_mostly=False)
        assert _C.range_attributes(x.data_ptr() + PAGE, PAGE)["read_mostly"]
        del x
        assert not attributes(y)["uniform"]  # the bytes live, and so does the advice
        address = y.data_ptr()
        block = _C.block_of(y)
        del y
        assert block is not None
        assert not any(_C.range_attributes(address + i * PAGE, PAGE)["read_mostly"] for i in range(32))

    def test_on_a_page_of_two_tensors_goes_with_the_first(self) -> None:
        page = page_bytes()
        run = neighbours(3, page * 5 // 2)
        del run[0 if run[1].data_ptr() % page == 0 else 2]  # the border of the two is inside a page
        border = run[1].data_ptr()
        advise(run, read_mostly=True)
        [(address, count)] = _C.page_ranges(run, page)
        assert address < border < address + count and border % page != 0
        assert _C.range_attributes(address, count)["read_mostly"]
        del run[0]
        for begin in range(address, address + count, page):
            assert _C.range_attributes(begin, page)["read_mostly"] == (begin >= border)
        run.clear()
        assert not _C.range_attributes(address, count)["read_mostly"]
        assert _C.range_attributes(address, count)["uniform"]

    def test_freeing_others_makes_no_calls(self) -> None:
        x, y = on_host(2 * MIB), on_host(2 * MIB)
        advise(x, read_mostly=True)
        made = calls("advise")
        del y
        assert calls("advise") == made
        advise(x, read_mostly=False)
        made = calls("advise")
        del x
        assert calls("advise") == made


class TestDiscard:
    def test_makes_moving_free(self) -> None:
        x = torch_uvm.ones(4 * MIB, dtype=torch.uint8)
        discard(x)
        assert calls("discard") == 1
        prefetch(x, "cpu")
        assert emulated.counters()["bytes_to_host"] == 0
        x.fill_(3)
        assert bool((x == 3).all())

    def test_never_covers_a_gap(self) -> None:
        x = torch_uvm.ones(16, PAGE, dtype=torch.uint8)
        discard(x[:, : PAGE - 512])
        assert calls("discard") == 0
        discard(x[::2])
        assert calls("discard") == 8
        prefetch(x, "cpu")
        assert emulated.counters()["bytes_to_host"] == 8 * PAGE

    def test_keeps_what_neighbours_contain(self) -> None:
        left, x, right = neighbours(3, 160 * 1024)
        discard(x)
        prefetch([left, x, right], "cpu")
        own = sum(count for _, count in _C.page_ranges([x], PAGE))
        given = sum(count for _, count in _C.page_ranges([left, x, right], PAGE))
        assert emulated.counters()["bytes_to_host"] == given - own > 0 < own
        assert bool((left == 1).all()) and bool((right == 1).all())

    def test_is_a_write_to_autograd(self) -> None:
        x = torch_uvm.ones(MIB)
        y = torch_uvm.to(x, "cpu")
        discard(x)
        assert x._version == y._version == 2  # ones() has filled it
        weight = torch_uvm.ones(MIB).requires_grad_()
        loss = (x * weight).sum()
        discard(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_of_a_leaf_that_requires_grad(self) -> None:
        weight = nn.Parameter(torch_uvm.ones(MIB))
        spare = torch_uvm.ones(MIB)
        for x in (weight, weight[:10], [spare, weight]):
            with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
                discard(x)
        assert calls("discard") == 0
        assert spare._version == 1
        with torch.no_grad():
            discard(weight)
        assert calls("discard") == 1

    def test_of_inference_tensors(self) -> None:
        with torch.inference_mode():
            x = torch_uvm.ones(MIB)
            discard(x)
        with pytest.raises(RuntimeError, match="inference tensor outside InferenceMode"):
            discard(x)
        assert calls("discard") == 1


class TestResidency:
    def test_of_what_is_not_managed(self) -> None:
        x = torch.zeros(4, 6)
        assert residency(x) == residency([x, x.t(), x[1]]) == {CPU: 96}
        assert residency(x[:, ::2]) == {CPU: 48}
        assert residency(x[:1].expand(5, 6)) == {CPU: 24}
        assert residency(torch.zeros(3, device="emu")) == {EMU: 12}
        assert residency(torch.zeros(0)) == residency([]) == residency(torch_uvm.empty(0)) == {}

    def test_of_views_counts_their_elements(self) -> None:
        x = on_host(16 * PAGE).view(16, PAGE)
        prefetch(x[4:8], EMU)
        assert residency(x) == {CPU: 12 * PAGE, EMU: 4 * PAGE}
        assert residency(x[:, :3]) == {CPU: 36, EMU: 12}
        assert residency([x[4:6], x[5:7], torch_uvm.to(x[6:8], "cpu")]) == {EMU: 4 * PAGE}

    def test_of_very_many_runs_is_shared_out(self) -> None:
        x = on_host(4 * MIB)
        prefetch(x[:MIB], EMU)
        assert residency(x[::2]) == {CPU: 3 * MIB // 2, EMU: MIB // 2}
        assert residency([x[::2], x[1::2]]) == {CPU: 3 * MIB, EMU: MIB}

    def test_after_moves(self) -> None:
        x = on_host(4 * MIB)
        y = torch_uvm.to(x, EMU)
        assert residency(x) == residency(y) == emulated.residency(y) == {EMU: 4 * MIB}

    def test_does_not_take_an_earlier_tensors_prefetch_for_its_own(self) -> None:
        x = on_host(4 * MIB)
        prefetch(x[: 3 * MIB], EMU)
        address = x.data_ptr()
        del x
        y = torch_uvm.ones(4 * MIB, dtype=torch.uint8, device="cpu")
        assert y.data_ptr() == address
        assert residency(y) == {CPU: 4 * MIB}


def test_results_never_change() -> None:
    """A training run with hints sprinkled over it, to the last bit."""

    def train(hint: Callable[[Any, str], None]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
        with torch_uvm.enabled():
            model.to("emu")
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            inputs = torch.randn(64, 256).to("emu")
            for step in range(6):
                hint([model, optimizer, {"inputs": inputs}], "cpu" if step % 2 else "emu")
                loss = model(inputs).square().mean()
                hint(optimizer, "cpu")
                loss.backward()
                hint([p.grad for p in model.parameters()], "emu")
                optimizer.step()
                hint(model, "cpu")
                optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    def both(x: Any, device: str) -> None:
        advise(x, read_mostly=device == "cpu", preferred_location=device, accessed_by=["cpu", "emu"])
        prefetch(x, device)

    plain, hinted = train(lambda x, device: None), train(both)
    assert calls("prefetch") > 10 and calls("advise") > 10
    assert all(torch.equal(a, b) for a, b in zip(plain, hinted, strict=True))


def test_hints_do_nothing_where_memory_takes_none(spawn: Spawn) -> None:
    done = spawn("""
        import torch, torch_uvm
        from torch_uvm import _C, emulated
        from torch_uvm import advise, discard, prefetch, residency
        x = torch_uvm.ones(1 << 20, device="cpu")
        _C.pretend_not_concurrent(True)
        emulated.reset_counters()
        for _ in range(3):
            prefetch(x, "emu"); prefetch(x, "cpu"); advise(x, True, "emu", "cpu"); discard(x)
        counters = emulated.counters()
        assert not any(counters[f"{name}_calls"] for name in ("prefetch", "advise", "discard")), counters
        assert residency(x) == {torch.device("cpu"): 1 << 22}
        assert x._version == 4 and bool((x == 1).all())
    """)
    assert done.stderr.count("hints about managed memory do nothing here") == 1


def test_copied_modules_carry_no_advice() -> None:
    model = torch_uvm.to(nn.Linear(1024, 1024), "emu", managed=True)
    advise(model, read_mostly=True)
    with torch_uvm.enabled():
        assert advice(copy.deepcopy(model).weight) == NO_ADVICE
