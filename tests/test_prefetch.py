"""Prefetch: the moved pages, and the containers that all hints accept."""

# torch has no stubs for torch.emu; wrong arguments are the point of some tests.
# mypy: disable-error-code="arg-type, attr-defined"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _emulated_hints import (
    calls,
    fresh_counters,  # noqa: F401  (every test has it)
    on_host,
)
from _hint_pages import MIB, PAGE, home, neighbours
from torch import nn

import torch_uvm
from torch_uvm import advise, emulated, prefetch, residency

EMU = torch.device("emu:0")
CPU = torch.device("cpu")


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
        inner = run[2:6]  # shares no page with other tensors
        assert [emulated.residency(t) for t in inner] == [{CPU: 160 * 1024}] * 4
        assert emulated.residency(run[0]) == emulated.residency(run[7]) == {EMU: 160 * 1024}

    def test_bytes_under_two_labels_move_once(self) -> None:
        x = on_host(4 * MIB)
        prefetch([x, torch_uvm.to(x, EMU), x.view(2, -1)], "cpu")
        assert calls("prefetch") <= 2  # one call belongs to the move
        emulated.reset_counters()
        prefetch([x, torch_uvm.to(x, EMU)], EMU)
        assert emulated.counters()["bytes_to_device"] <= 4 * MIB

    def test_changes_the_home_of_the_block(self) -> None:
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
        [segment] = [
            s for s in torch_uvm.memory.memory_snapshot() if 0 <= address - s["address"] < s["total_size"]
        ]
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

    def test_unmanaged_tensors_in_containers_are_skipped(self) -> None:
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
        assert calls("prefetch") == 1  # the other tensors are smaller than a page
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
