"""benchmarks/lower_bound.py: bounds worked out by hand, and played schedules, which are never faster."""

from __future__ import annotations

import dataclasses
import importlib
import json
import lzma
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("scipy")

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
MB = 10**6
ROUNDS = 12  # of two operators or more: the engine recognises a loop once 16 operators repeat
ADAMW = "aten::_fused_adamw_"


@pytest.fixture(scope="module")
def lower_bound() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("lower_bound")


@pytest.fixture(scope="module")
def rates(lower_bound: ModuleType) -> Any:
    """50 MB a ms each way, 40 in place."""
    return lower_bound.LinkRates(into=50e9, out=50e9, in_place=40e9)


class Script:
    """Writes a trace of operators of a millisecond each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        units = {"time": "us", "size": "bytes"}
        self.lines: list[dict[str, Any]] = [
            {"format": "torch_uvm accesses", "version": 3, "units": units, "budgets": [None]}
        ]
        self.operators = 0

    def storage(self, name: int, size: int, device: int = 0) -> None:
        self.lines.append({"storage": name, "device": device, "bytes": size, "resident": True})

    def op(
        self,
        reads: list[int],
        writes: list[int] | None = None,
        births: dict[int, int] | None = None,
        deaths: list[int] | None = None,
        in_place: bool = False,
        name: str = "x",
        us: float | None = 1000,
    ) -> None:
        times = {"time": self.operators, "in_place_ok": in_place}
        self.lines.append({"operator": name} | times | {"reads": reads, "writes": writes or []})
        self.lines += [{"birth": made, "device": 0, "bytes": size} for made, size in (births or {}).items()]
        self.lines += [{"death": gone} for gone in deaths or []]
        if us is not None:
            self.lines.append({"ran": self.operators, "operators": 1, "us": us})
        self.operators += 1

    def written_ring(self) -> None:
        """Three weights of 100 MB that are written in turn."""
        for name in (1, 2, 3):
            self.storage(name, 100 * MB)
        for _ in range(ROUNDS):
            for name in (1, 2, 3):
                self.op([], writes=[name])

    def write(self) -> Path:
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return self.path


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path / "trace")


@pytest.mark.parametrize(("budget", "ms"), [(300, 3), (250, 3), (200, 3), (150, 4.5), (100, 6)])
def test_a_ring_of_three(lower_bound: ModuleType, rates: Any, script: Script, budget: int, ms: float) -> None:
    """Of three weights that are read in turn, what does not fit comes one and a half times a round.

    The host keeps what is only read, so nothing has to leave.
    """
    for name in (1, 2, 3):
        script.storage(name, 100 * MB)
    for _ in range(ROUNDS):
        for name in (1, 2, 3):
            script.op([name])
    got = lower_bound.bound(script.write(), budget * MB, rates=rates)
    assert got["in_core_ms"] == pytest.approx(3)
    assert got["bound_ms"] == pytest.approx(ms)


@pytest.mark.parametrize(("both", "ms"), [(None, 6), (75e9, 8), (60e9, 10)])
def test_both_directions_share_the_link(
    lower_bound: ModuleType, rates: Any, script: Script, both: float | None, ms: float
) -> None:
    """Three weights that are written in turn, with room for one: 300 MB come and 300 MB leave."""
    script.written_ring()
    shared = dataclasses.replace(rates, both=both)
    assert lower_bound.bound(script.write(), 100 * MB, rates=shared)["bound_ms"] == pytest.approx(ms)


def test_written_storages_are_written_back_again(lower_bound: ModuleType, rates: Any, script: Script) -> None:
    for name in (1, 2):
        script.storage(name, 100 * MB)
    for _ in range(ROUNDS):
        script.op([], writes=[1])
        script.op([2])
    got = lower_bound.bound(script.write(), 100 * MB, rates=rates)
    assert got["bound_ms"] == pytest.approx(4)  # both weights come in


def test_a_part_of_a_storage_may_stay_resident(lower_bound: ModuleType, rates: Any, script: Script) -> None:
    """Two activations of 100 MB with room for 180: of the first one 20 MB leave, and come back."""
    script.storage(99, MB)
    for step in range(ROUNDS):
        first, second = 10 * step + 1, 10 * step + 2
        script.op([99], births={first: 100 * MB})
        script.op([99], births={second: 100 * MB})
        script.op([second], deaths=[second])
        script.op([first], deaths=[first])
    got = lower_bound.bound(script.write(), 181 * MB, rates=rates)
    assert got["bound_ms"] == pytest.approx(4)
    # The second operator has room for its own result only, and the third one for its operand. 100 MB go and
    # come beside two operators of a millisecond.
    assert lower_bound.bound(script.path, 101 * MB, rates=rates)["bound_ms"] == pytest.approx(5.98)


@pytest.mark.parametrize(("budget", "in_place"), [(300, 0), (200, 100), (100, 200)])
def test_uses_in_place_take_the_operators_time(
    lower_bound: ModuleType, rates: Any, script: Script, budget: int, in_place: int
) -> None:
    """A parameter is used twice; then an operator updates it and its state, for what is absent in place."""
    script.storage(1, 100 * MB)
    script.storage(2, 200 * MB)
    for _ in range(ROUNDS):
        script.op([1], us=4000)
        script.op([1], us=4000)
        script.op([], writes=[1, 2], in_place=True, us=100)
    got = lower_bound.bound(script.write(), budget * MB, rates=rates)
    assert got["in_place"] == pytest.approx(in_place * MB)
    assert got["bound_ms"] == pytest.approx(8 + max(0.1, in_place / 40))


def test_what_is_used_last_is_kept_until_it_is_freed(
    lower_bound: ModuleType, rates: Any, script: Script
) -> None:
    """The program may still read it. 200 MB go once they are made, beside two operators of a millisecond."""
    script.storage(99, MB)
    for step in range(ROUNDS):
        kept, peak = 100 + step, 200 + step
        script.op([99], births={kept: 200 * MB})
        script.op([kept])
        script.op([99], births={peak: 200 * MB}, deaths=[peak])
        script.op([99], us=20_000, deaths=[kept])
    got = lower_bound.bound(script.write(), 201 * MB, rates=rates)
    assert got["bound_ms"] == pytest.approx(23 + 4 - 2)


def test_an_optimizer_may_update_later(lower_bound: ModuleType, rates: Any, script: Script) -> None:
    """Its 200 MB of state come until the parameter's next use, and go beside the rest of the step."""
    script.storage(1, 100 * MB)
    script.storage(2, 200 * MB)
    for _ in range(ROUNDS):
        script.op([1], us=4000)
        script.op([1], us=4000)
        script.op([], writes=[1, 2], in_place=True, us=100, name=ADAMW)
    got = lower_bound.bound(script.write(), 100 * MB, rates=rates)
    assert got["bound_ms"] == pytest.approx(8.1)
    assert lower_bound.bound(script.path, 100 * MB, step_ms=2, rates=rates)["bound_ms"] == pytest.approx(
        4 + 2 * 4000 / 8100  # nothing comes beside the second operator
    )


class TestWhatUpdatesNeed:
    """The optimizer takes 0.1 ms and the operators around it 1 ms each. 200 MB cross the link in 4 ms."""

    def test_a_parameter_is_written_back_once_it_is_updated(
        self, lower_bound: ModuleType, rates: Any, script: Script
    ) -> None:
        script.storage(1, 200 * MB)
        for step in range(ROUNDS):
            peak = 100 + step
            script.op([1])
            script.op([], births={peak: 200 * MB}, deaths=[peak])
            script.op([1], us=20_000)
            script.op([], writes=[1], in_place=True, us=100, name=ADAMW)
        got = lower_bound.bound(script.write(), 200 * MB, rates=rates)
        assert got["bound_ms"] == pytest.approx(22.1 + 4 - 2.1)

    def test_a_gradient_that_left_comes_back(
        self, lower_bound: ModuleType, rates: Any, script: Script
    ) -> None:
        script.storage(1, MB)
        for step in range(ROUNDS):
            gradient, peak = 100 + step, 200 + step
            script.op([1])
            script.op([1], births={gradient: 200 * MB})
            script.op([1], us=20_000)
            script.op([1], births={peak: 200 * MB}, deaths=[peak])
            script.op([], writes=[1, gradient], deaths=[gradient], in_place=True, us=100, name=ADAMW)
        got = lower_bound.bound(script.write(), 201 * MB, rates=rates)
        assert got["bound_ms"] == pytest.approx(23.1 + 4 - 1.1)

    def test_state_comes_before_its_own_parameter_is_used(
        self, lower_bound: ModuleType, rates: Any, script: Script
    ) -> None:
        for name, size in ((1, 10), (2, 10), (3, 200), (4, 200)):
            script.storage(name, size * MB)
        for _ in range(ROUNDS):
            script.op([1])
            script.op([], us=20_000)
            script.op([2])
            script.op([], writes=[1, 2, 3, 4], in_place=True, us=100, name=ADAMW)
        got = lower_bound.bound(script.write(), 20 * MB, rates=rates)
        assert got["bound_ms"] == pytest.approx(22.1 + 4 - 1.1)


def test_what_one_iteration_leaves_to_the_next(lower_bound: ModuleType, rates: Any, script: Script) -> None:
    """A gradient is made late in an iteration and freed early in the next one. It takes room meanwhile."""
    script.storage(99, MB)
    for step in range(ROUNDS):
        script.op(
            [99] + ([step] if step else []), births={1000 + step: 50 * MB}, deaths=[step] if step else []
        )
        script.op([1000 + step], births={step + 1: 100 * MB}, deaths=[1000 + step])
    assert lower_bound.bound(script.write(), 151 * MB, rates=rates)["bound_ms"] == pytest.approx(2)
    with pytest.raises(ValueError, match="exceed the budget"):
        lower_bound.bound(script.path, 140 * MB, rates=rates)


@pytest.mark.parametrize(("budget", "ms"), [(400, 3), (300, 3), (250, 4), (200, 6)])
def test_a_cache_that_is_replaced_lasts_until_the_next_one_is_made(
    lower_bound: ModuleType, rates: Any, script: Script, budget: int, ms: float
) -> None:
    """The old cache and the new one are there together, and beside the weights, of 200 MB, there is one."""
    script.storage(1, 200 * MB)
    script.storage(100, 100 * MB)
    for step in range(100, 100 + ROUNDS):
        script.op([step], births={step + 1: 100 * MB}, deaths=[step], name="cat")
        script.op([step + 1])
        script.op([1])
    got = lower_bound.bound(script.write(), budget * MB, rates=rates)
    # Within 200 MB the weights make room for a second cache, and the cache makes room for the weights.
    assert got["bound_ms"] == pytest.approx(ms)
    with pytest.raises(ValueError, match="exceed the budget"):
        lower_bound.bound(script.path, 190 * MB, rates=rates)


class TestReading:
    def test_needs_iterations_that_repeat(self, lower_bound: ModuleType, script: Script) -> None:
        script.storage(1, MB)
        for number in range(6):
            script.op([1], name=f"operator {number}")
        with pytest.raises(ValueError, match="has no iteration that repeats"):
            lower_bound.bound(script.write(), MB)

    def test_needs_durations(self, lower_bound: ModuleType, script: Script) -> None:
        script.storage(1, MB)
        for _ in range(20):
            script.op([1], us=None)
            script.op([1], us=None, name="y")
        with pytest.raises(ValueError, match="no durations"):
            lower_bound.bound(script.write(), MB)
        assert lower_bound.bound(script.path, MB, step_ms=5)["bound_ms"] == pytest.approx(5)

    def test_takes_one_device(self, lower_bound: ModuleType, script: Script) -> None:
        script.storage(1, MB)
        script.storage(2, MB, device=1)
        for _ in range(20):
            script.op([1, 2])
        with pytest.raises(ValueError, match="more than one device"):
            lower_bound.bound(script.write(), MB)

    def test_the_command(
        self, lower_bound: ModuleType, script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        script.storage(1, MB)
        for _ in range(20):
            script.op([1])
        out = tmp_path / "out.json"
        argv = [str(script.write()), "--budget", "1GiB", "--step-ms", "3", "--json", str(out)]
        assert lower_bound.main(argv) == 0
        assert json.loads(out.read_text())["bound_ms"] == pytest.approx(3)
        assert "bound_ms" in capsys.readouterr().out
        for other, text in (("none", None), ("text", "no trace\n")):
            path = tmp_path / other
            if text is not None:
                path.write_text(text)
            with pytest.raises(SystemExit):
                lower_bound.main([str(path), "--budget", "1GiB"])


@pytest.mark.parametrize("part", [1.5, 2])
@pytest.mark.parametrize(
    "workload",
    [pytest.param("16k tokens, checkpointing", marks=pytest.mark.nightly), "2k tokens, checkpointing"],
)
def test_no_played_schedule_is_faster(
    lower_bound: ModuleType, tmp_path: Path, pytestconfig: pytest.Config, workload: str, part: float
) -> None:
    """Traces of an H200, played through the engine at the rates of the bound."""
    player = pytestconfig.getoption("--cpp-build").resolve() / "play_accesses"
    if not player.exists():
        pytest.skip("play_accesses is not built")
    row = json.loads((BENCHMARKS / "traces" / "index.json").read_text())[workload]["in_place"]
    trace = tmp_path / "trace"
    trace.write_bytes(lzma.decompress((BENCHMARKS / "traces" / row["file"]).read_bytes()))
    budget = int(row["peak_bytes"] / part)
    command = [str(player), str(trace), "--budget", str(budget), "--step-ms", str(row["step_ms"])]
    played = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    assert re.fullmatch(r"[\d\s.]+", played)
    bound = lower_bound.bound(trace, budget, row["step_ms"])
    assert bound["in_core_ms"] == pytest.approx(row["step_ms"])
    assert row["step_ms"] * 0.9999 <= bound["bound_ms"] <= float(played.split()[-1])
