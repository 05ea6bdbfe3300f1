"""The advice and the pictures of a report, from synthetic figures."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import _report_pages as pages
import pytest

from torch_uvm.report import charts
from torch_uvm.report.advice import advice
from torch_uvm.report.facts import Facts
from torch_uvm.report.page import page
from torch_uvm.report.samples import Sample


def facts(**changed: Any) -> Facts:
    """Figures of a run with traffic, 20 steps, and no problems."""
    totals = {"fetched.bytes": 1e9, "fetched.count": 10, "plan_hits": 990, "plan_misses": 10}
    half = {name: value / 2 for name, value in totals.items()} | {"plan_misses": 10}
    given: dict[str, Any] = {
        "title": "train.py",
        "ended": "2026-01-01 00:00:00; ended",
        "settings": {"budget": "10GiB"},
        "backend": "cuda",
        "devices": {0: "a device"},
        "enabled": True,
        "samples": [Sample(0), Sample(5, totals=half, steps=10), Sample(10, totals=totals, steps=20)],
        "step_ends": [],
        "peaks": {0: 8 << 30},
        "most_reserved": 8 << 30,
        "budgets": {0: 10 << 30},
        "limit": None,
        "host_limit": None,
        "one_memory": False,
        "storages": [],
    }
    if "totals" in changed:
        totals.update(changed.pop("totals"))
    return Facts(**{**given, **changed})


class TestAdvice:
    @pytest.mark.parametrize(
        ("changed", "key"),
        [
            ({"totals": {"num_ooms": 2}}, "oom"),
            ({"totals": {"over_budget": 3}}, "over-budget"),
            ({"totals": {"waited.ms": 400, "made_room.ms": 200}}, "waited"),
            ({"totals": {"plan_misses": 300}}, "misses"),
            ({"totals": {"plan_hits": 0}}, "no-plan"),
            ({"limit": 8 << 30}, "limit"),
            ({"budgets": {}}, "no-budget"),
            ({"backend": "emulated"}, "modelled"),
            ({"most_reserved": 0, "peaks": {}, "samples": [Sample(1)]}, "nothing"),
            ({"samples": [Sample(1)]}, "fits"),
        ],
        ids=lambda it: it if isinstance(it, str) else "",
    )
    def test_is_given_for_its_figure(self, changed: dict[str, Any], key: str) -> None:
        assert key not in [it.key for it in advice(facts())]
        said = {it.key: it for it in advice(facts(**changed))}
        assert key in said and said[key].title and said[key].text
        assert pages.Page(page(facts(**changed))).advice.keys() == said.keys()

    def test_of_a_schedule_that_matches(self) -> None:
        assert advice(facts()) == []

    def test_of_the_host_limit(self) -> None:
        full = [Sample(0), Sample(1, host=63 << 30, totals=facts().samples[-1].totals, steps=20)]
        assert "host-limit" in [it.key for it in advice(facts(samples=full, host_limit=64 << 30))]
        assert "host-limit" not in [it.key for it in advice(facts(samples=full, host_limit=128 << 30))]

    def test_code_is_set_as_code(self) -> None:
        assert "<code>run --limit</code>" in page(facts(limit=8 << 30))

    def test_a_short_run_is_not_judged(self) -> None:
        last = facts(totals={"plan_misses": 300}).samples[-1]
        short = [Sample(0), replace(last, steps=4)]
        keys = [it.key for it in advice(facts(samples=short))]
        assert "misses" not in keys


class TestPictures:
    def test_lines_end_at_the_totals(self) -> None:
        """2 MiB at the end: the height of the axis; 1 MiB is half of it, from the time of its sample on."""
        totals = [{"fetched.bytes": it * 2.0**20} for it in range(3)]
        taken = [Sample(at, totals=it) for at, it in zip((0, 5, 10), totals, strict=True)]
        drawn = str(charts.pictures(taken, [], {}, {}))
        line = re.search('<polyline class="to-device" points="([^"]*)"', drawn)
        bottom, top = (re.search(f'y="(.*?)"[^>]*>{it}<', drawn) for it in ("0", "2 MiB"))
        assert line and bottom and top
        heights = [float(it.partition(",")[2]) + 4 for it in line[1].split()]
        low, high = float(bottom[1]), float(top[1])
        assert heights == pytest.approx([low, low, (low + high) / 2, (low + high) / 2, high], abs=0.2)

    def test_the_card_and_the_table_agree_on_the_hosts_waits(self) -> None:
        seen = pages.Page(page(facts(totals={"waited.ms": 1500, "made_room.ms": 250})))
        assert seen.figures["waited-seconds"] == 1.75
        assert seen.figures["waited.ms"] + seen.figures["made_room.ms"] == 1750

    @pytest.mark.parametrize(
        ("most", "last", "count"), [(0, 1, 2), (1, 1, 6), (0.003, 0.003, 4), (95, 100, 6), (300, 300, 4)]
    )
    def test_ticks_are_round(self, most: float, last: float, count: int) -> None:
        ticks = charts.nice_ticks(most)
        assert ticks[0] == 0 and ticks[-1] == pytest.approx(last) and len(ticks) == count

    def test_figures_are_exact(self) -> None:
        seen = pages.Page(page(facts(most_reserved=2**53 - 1, totals={"fetched.ms": 0.1 + 0.2})))
        assert seen.figures["peak-managed"] == 2**53 - 1 and seen.figures["fetched.ms"] == 0.1 + 0.2

    def test_a_run_of_no_time(self) -> None:
        seen = pages.Page(page(facts(samples=[Sample(0)])))
        assert seen.pictures and seen.figures["seconds"] == 0

    def test_several_devices_have_one_each(self) -> None:
        two = [Sample(0), Sample(1, resident={0: 5, 1: 7}, host=3)]
        seen = pages.Page(page(facts(samples=two, peaks={0: 5, 1: 7}, devices={0: "a", 1: "b"})))
        assert seen.pictures == ["Memory over time: device 0, a", "Memory over time: device 1, b"]
        assert (seen.figures["peak-0"], seen.figures["peak-1"]) == (5, 7)
