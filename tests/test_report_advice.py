"""The advice and the pictures of a report, from synthetic figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import _report_pages as pages
import pytest

from torch_uvm.report import charts
from torch_uvm.report.advice import advice
from torch_uvm.report.allocation_sites import Storages
from torch_uvm.report.facts import Facts
from torch_uvm.report.page import page
from torch_uvm.report.samples import Sample


def facts(**changed: Any) -> Facts:
    """Figures of a run with traffic, 20 steps, and no problems."""
    totals = {"fetched.bytes": 1e9, "fetched.count": 10, "plan_hits": 990, "plan_misses": 10}
    half = {name: value / 2 for name, value in totals.items()} | {"plan_misses": 10}
    given: dict[str, Any] = {
        "script": "train.py",
        "ended": "ended",
        "began": "2026-01-01 00:00:00",
        "rank": None,
        "torch_uvm": "1",
        "torch": "2",
        "python": "3",
        "backend": "cuda",
        "devices": {0: "a device"},
        "enabled": True,
        "samples": [Sample(0), Sample(5, totals=half, steps=10), Sample(10, totals=totals, steps=20)],
        "by_step": [],
        "peaks": {0: 8 << 30},
        "most_reserved": 8 << 30,
        "budgets": {0: 10 << 30},
        "asked": "10GiB",
        "limit": None,
        "host_limit": None,
        "optimizer": "deferred",
        "optimizers": ["AdamW"],
        "storages": [],
    }
    if "totals" in changed:
        totals.update(changed.pop("totals"))
    return Facts(**{**given, **changed})


def storages(line: int, fetched: int) -> Storages:
    moved = {
        it: {"count": 0, "bytes": 0} for it in ("fetched", "written_back", "dropped_clean", "used_in_place")
    }
    moved["fetched"] = {"count": 1, "bytes": fetched}
    return Storages("a.py", line, "f", "", False, fetched, 1, 1, moved)


class TestAdvice:
    @pytest.mark.parametrize(
        ("changed", "key"),
        [
            ({"totals": {"num_ooms": 2}}, "oom"),
            ({"totals": {"over_budget": 3}}, "over-budget"),
            ({"totals": {"waited.ms": 400, "made_room.ms": 200}}, "waited"),
            ({"totals": {"failures": 1}}, "failures"),
            ({"totals": {"plan_misses": 300}}, "misses"),
            ({"totals": {"plan_hits": 0}}, "no-plan"),
            ({"optimizer": "in_place"}, "deferred"),
            ({"limit": 8 << 30}, "limit"),
            ({"budgets": {}}, "no-budget"),
            ({"budgets": {}, "one_memory": True}, "one-memory"),
            ({"backend": "emulated"}, "modelled"),
            ({"storages": [storages(1, 900), storages(2, 100)]}, "one-line"),
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
        said = advice(facts())
        assert [it.key for it in said] == ["planned"]
        assert "10 of 10 misses" in said[0].text

    def test_of_the_host_limit(self) -> None:
        full = [Sample(0), Sample(1, host=63 << 30, totals=facts().samples[-1].totals, steps=20)]
        assert "host-limit" in [it.key for it in advice(facts(samples=full, host_limit=64 << 30))]
        assert "host-limit" not in [it.key for it in advice(facts(samples=full, host_limit=128 << 30))]

    def test_does_not_suggest_deferral_where_it_has_no_effect(self) -> None:
        said = advice(facts(optimizer="in_place", optimizers=["Muon"]))
        assert "deferred" not in [it.key for it in said]

    def test_of_operators_over_the_budget_in_a_foreach_optimizer(self) -> None:
        """Updating all parameters at once exceeds the budget: splitting layers would not help."""
        over = facts(totals={"over_budget": 5}, foreach=["AdamW"], over_in_steps=4)
        (said,) = (it for it in advice(over) if it.key == "over-budget")
        assert "4 of 5" in said.title and "AdamW(..., fused=True)" in said.text
        assert "layers" not in said.text
        others: dict[str, Any]
        for others in ({"over_in_steps": 1}, {"foreach": []}):
            (said,) = (it for it in advice(replace(over, **others)) if it.key == "over-budget")
            assert "largest layers" in said.text and "fused" not in said.text

    def test_code_is_set_as_code(self) -> None:
        """Quoted text of other programs stays text."""
        rules: list[dict[str, Any]] = [
            {"limit": 8 << 30},
            {"totals": {"over_budget": 1}, "foreach": ["SGD"], "over_in_steps": 1},
            {"optimizer": "in_place"},
            {"storages": [storages(1, 900), replace(storages(2, 100), file="`<b>`.py")]},
        ]
        for changed in rules:
            said = pages.Page(page(facts(**changed)))
            assert not any("`" in words for words in said.advice.values())
        assert "<code>run --limit</code>" in page(facts(limit=8 << 30))

    def test_a_short_run_is_not_judged(self) -> None:
        last = facts(totals={"plan_misses": 300}).samples[-1]
        short = [Sample(0), replace(last, steps=4)]
        keys = [it.key for it in advice(facts(samples=short))]
        assert "few-steps" in keys and "misses" not in keys


class TestPictures:
    def test_rates_do_not_exceed_the_link(self) -> None:
        """100 GB are requested within a second, and the copies took two: 50 GB/s."""
        totals = {"fetched.bytes": 100e9, "fetched.ms": 2000.0, "used_in_place.bytes": 10e9}
        taken = [Sample(0), Sample(1), Sample(2, totals=totals), Sample(10, totals=totals)]
        asked = [charts.rates(taken, f"{it}.bytes", 100) for it in ("fetched", "used_in_place")]
        carried = charts.carried(asked, charts._fastest(taken, ["fetched"]))
        assert max(asked[0]) == pytest.approx(100e9)
        assert max(map(sum, zip(*carried, strict=True))) == pytest.approx(50e9)
        for series, count in zip(carried, (100e9, 10e9), strict=True):
            assert sum(series) * 10 / 100 == pytest.approx(count)
        assert charts.carried(asked, 0.0) == asked
        drawn = charts.link(taken, "title")
        assert ">50<" in drawn and ">100<" not in drawn

    def test_the_card_and_the_table_agree_on_the_hosts_waits(self) -> None:
        seen = pages.Page(page(facts(totals={"waited.ms": 1500, "made_room.ms": 250})))
        assert seen.figures["waited-seconds"] == 1.75 and seen.figures["waited-in-all.ms"] == 1750
        assert seen.figures["waited.ms"] + seen.figures["made_room.ms"] == 1750
        assert "1.50 s for copies, 0.25 s for room" in seen.text

    def test_rates_add_up_to_totals(self) -> None:
        taken = [Sample(t, totals={"x": v}) for t, v in ((0, 0), (1.5, 30), (1.5, 40), (4, 40), (10, 100))]
        for bins in (1, 7, 180):
            rates = charts.rates(taken, "x", bins)
            assert len(rates) == bins and sum(rates) * 10 / bins == pytest.approx(100)

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
