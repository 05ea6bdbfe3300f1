"""The example of an embedding table larger than its budget: equal results, and the bytes that each way
moves."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from _spawn import Spawn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import embedding_table as example  # noqa: E402

SCRIPT = str(ROOT / "examples" / "embedding_table.py")
TABLE = 16 << 20
ROW = 256
STEPS = 2
Cases = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The script's figures. The script checks that all ways give equal results; a test below checks that
    check."""
    folder = tmp_path_factory.mktemp("embedding")
    arguments = [SCRIPT, f"--size={TABLE >> 20}", f"--steps={STEPS}", f"--json={folder / 'figures.json'}"]
    done = Spawn(folder)(args=arguments, env={"TORCH_UVM_DEVICE": "emu"})
    assert "All ways gave the same losses and the same table, to the last bit." in done.stdout
    written: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return written | {"printed": done.stdout}


def link_bytes(figures: dict[str, Any], way: str) -> dict[str, float]:
    return {case: cost["link_bytes"] for case, cost in figures["steps"][way].items()}


def test_the_table_does_not_fit(figures: dict[str, Any]) -> None:
    assert figures["table_bytes"] == TABLE > figures["budget"]
    assert set(figures["steps"]) == set(example.WAYS)
    for way in example.WAYS:
        assert list(figures["steps"][way]) == [case.name for case in example.CASES]
        assert figures["printed"].count(f"\n{way}  ") == 2  # a row in each table


@pytest.mark.parametrize("way", ["in place, by the engine", "in place, by advice"])
def test_scattered_rows_move_least_in_place(figures: dict[str, Any], way: str) -> None:
    ours = link_bytes(figures, way)
    for case in example.CASES:
        if not case.again:
            rows = int(case.fraction * TABLE / ROW) * ROW
            assert 2 * rows <= ours[case.name] < 4 * rows + (1 << 20)  # each read once and written once
            for other in ("page faults", "the rows' pages prefetched", "the whole table copied"):
                assert ours[case.name] < link_bytes(figures, other)[case.name] / 2


def test_repeated_rows_stay_after_faults(figures: dict[str, Any]) -> None:
    (case,) = [case.name for case in example.CASES if case.again]
    # The previous case filled the device. A few of its pages may still be written back.
    assert link_bytes(figures, "page faults")[case] < link_bytes(figures, "in place, by advice")[case] / 2
    assert link_bytes(figures, "the whole table copied")[case] >= 3 * TABLE


def test_a_different_result_is_noticed() -> None:
    right = example.Outcome({}, [1.0, 2.0], torch.zeros(3))
    example.check_equal({"a": right, "b": replace(right, contents=torch.zeros(3))})
    for wrong in (
        replace(right, losses=[1.0, 2.0 + 1e-15]),
        replace(right, contents=torch.tensor([0, 0, 1e-30])),
    ):
        with pytest.raises(AssertionError, match="b differs from a"):
            example.check_equal({"a": right, "b": wrong})


def test_rows_are_drawn_in_order_each_once() -> None:
    first, second = example.Case("", 0.1, again=False).draw(1000, 2)
    for rows in (first, second):
        assert len(rows) == 100 and (rows.diff() > 0).all() and 0 <= rows[0] and rows[-1] < 1000
    assert not torch.equal(first, second)
    assert all(
        torch.equal(rows, torch.arange(100)) for rows in example.Case("", 0.1, again=True).draw(1000, 2)
    )


@pytest.mark.parametrize("way", example.WAYS.values(), ids=lambda way: way.__name__)
def test_each_way_is_a_sparse_step(way: type[example.Way]) -> None:
    """Compares with the definition of the step, on the CPU."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    initial = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    table = way(initial, device, 1 << 30)
    rows = torch.tensor([0, 7, 8, 9, 63])
    batch = example.Batch(rows, rows.to(device))
    assert torch.equal(table.look_up(batch).cpu(), initial[batch.here])
    table.add(batch, torch.ones(5, 1024, device=device))
    expected = initial.clone()
    expected[batch.here] += example.RATE
    assert torch.equal(table.contents(), expected)
