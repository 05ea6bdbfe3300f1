"""What `python -m torch_uvm plan` refuses, its cards, and docs/plan.md against the data that it publishes."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torch_uvm import cli
from torch_uvm._tools.cards import card_names, load_card

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import plan_errors  # noqa: E402

TRACED = {
    "format": "torch_uvm accesses",
    "version": 3,
    "units": {"time": "us", "size": "bytes"},
    "budgets": [None],
}


def trace(path: Path, *, timed: bool = True, loops: int = 5, size: int = 1 << 30) -> Path:
    """Two operators a step, of a storage each."""
    lines: list[dict[str, Any]] = [TRACED]
    lines += [{"storage": name, "device": 0, "bytes": size, "resident": True} for name in (1, 2)]
    for number in range(2 * loops):
        named = f"operator {number if loops == 1 else number % 2}"
        used = {"time": number, "in_place_ok": False, "reads": [1 + number % 2], "writes": []}
        lines.append({"operator": named} | used)
        if timed:
            lines.append({"ran": number, "operators": 1, "us": 1000})
        if number % 2:
            lines.append({"step": "end"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class TestRefused:
    @pytest.mark.parametrize(
        ("argv", "named"),
        [
            ([], ["SCRIPT", "--from"]),
            (["--from", "TRACE", "train.py"], ["not both"]),
            (["--card", "h20", "--from", "TRACE"], ["'h20'", "did you mean h200?", "rtx4090", ".json"]),
            (["--card", "none.json", "--from", "TRACE"], ["none.json"]),
            (["--budgets", "8GB2", "--from", "TRACE"], ["8GB2", "8GiB,12GiB"]),
            (["--budgets", "0", "--from", "TRACE"], ["0 bytes"]),
            (["--budgets", "4GiB,", "--from", "TRACE"], ["accepted: auto"]),
            (
                ["--budgets", "100MiB", "--from", "TRACE"],
                ["100.00 MiB is too little", "operator", "smaller batch"],
            ),
            (["--steps", "3", "train.py"], ["--steps 3", "4 or more"]),
            (["--json", "/no/such/folder/plan.json", "--from", "TRACE"], ["/no/such/folder"]),
            (["--from", "no.trace"], ["no.trace"]),
            (["--from", __file__], ["line 1", "not a trace"]),
            (["--from", "UNTIMED"], ["no durations", "Record it on a GPU"]),
            (["--from", "ONCE"], ["no iteration that repeats", "four or more"]),
            (["--bugets", "4GiB"], ["'--bugets'", "did you mean --budgets?"]),
            (["no_such_script.py"], ["no script 'no_such_script.py'"]),
        ],
    )
    def test_by_name_with_what_to_do(
        self, argv: list[str], named: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        files = {
            "TRACE": trace(tmp_path / "run.trace"),
            "UNTIMED": trace(tmp_path / "untimed.trace", timed=False),
            "ONCE": trace(tmp_path / "once.trace", loops=1),
        }
        with pytest.raises(SystemExit) as ended:
            cli.main(["plan", *(str(files.get(word, word)) for word in argv)])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert all(word in said for word in named), said

    def test_control_characters_of_a_trace_are_not_printed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = trace(tmp_path / "run.trace")
        path.write_text(path.read_text().replace("operator 0", "\\u001b[31mred"))
        assert cli.main(["plan", "--from", str(path), "--budgets", "4GiB"]) == 0
        with pytest.raises(SystemExit):
            cli.main(["plan", "--from", str(path), "--budgets", "1MiB"])
        said = capsys.readouterr()
        assert "\x1b" not in said.out + said.err


class TestCards:
    def test_the_packages_cards_have_a_source_for_each_figure(self) -> None:
        assert {"h200", "h100", "a100", "rtx4090", "rtx5090", "l40s", "t4", "gb10", "gh200"} == set(
            card_names()
        )
        for name in card_names():
            assert load_card(name).name == name
            record = json.loads((ROOT / "torch_uvm" / "cards" / f"{name}.json").read_text())
            figures = [record[key] for key in ("memory_bytes", "memory_rate", "launch_us", "host_us")]
            figures += [it for table in ("flops", "link", "efficiency") for it in record[table].values()]
            known = ("NVIDIA", "nvidia-smi", "measured", "derived", "assumed", "no hardware", "a ", "the ")
            assert all(it["source"].startswith(known) for it in figures), name

    def test_measured_figures_are_those_of_the_emulator(self) -> None:
        page = (ROOT / "docs" / "emulator.md").read_text()
        h200 = load_card("h200")
        rates = {"copy_to_device": h200.into, "copy_to_host": h200.out, "in_place": h200.in_place}
        for name, value in rates.items():
            found = re.search(rf"`{name}_rate` \| ([\d.]+)", page)  # the first column is that of the H200
            assert found is not None and float(found[1]) * 1e9 == value

    def test_the_documented_card(self, tmp_path: Path) -> None:
        page = (ROOT / "docs" / "plan.md").read_text()
        (block,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
        path = tmp_path / "mine.json"
        path.write_text(block)
        card = load_card(path)
        assert card.memory_bytes == 24 << 30 and card.flops["bfloat16"] == 165.2e12

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda it: it.pop("format"), "begins with"),
            (lambda it: it.update(version=2), "begins with"),
            (lambda it: it.pop("memory_rate"), "lacks memory_rate"),
            (lambda it: it.update(memory_rat=1), "did you mean memory_rate?"),
            (lambda it: it.update(memory_bytes="24 GB"), "memory_bytes is '24 GB'; expected a number"),
            (lambda it: it.update(memory_rate=-1), "more than 0"),
            (lambda it: it.update(memory_rate=float("nan")), "more than 0"),
            (lambda it: it.update(memory_rate=True), "expected a number"),
            (lambda it: it.update(memory_rate={"value": 1}), '"source"'),
            (lambda it: it["flops"].pop("float32"), "lacks float32"),
            (lambda it: it["flops"].update(bf16=1e12), "did you mean"),
            (lambda it: it.update(flops=[]), "expected an object"),
            (lambda it: it["link"].pop("out"), "lacks out"),
            (lambda it: it["efficiency"].update(matmul=1.5), "at most 1"),
            (lambda it: it.update(name=""), "expected text"),
        ],
    )
    def test_bad_files(self, change: Callable[[Any], object], said: str, tmp_path: Path) -> None:
        record = json.loads((ROOT / "torch_uvm" / "cards" / "t4.json").read_text())
        change(record)
        path = tmp_path / "mine.json"
        path.write_text(json.dumps(record))
        with pytest.raises(ValueError, match=re.escape(said)) as raised:
            load_card(path)
        assert str(raised.value).startswith(str(path))

    @pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "\x00", "1" * (2 << 20)])
    def test_files_that_are_no_card(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "mine.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            load_card(path)


class TestPublishedErrors:
    """docs/plan.md against what benchmarks/plan_errors.py computes."""

    page = (ROOT / "docs" / "plan.md").read_text()

    def published(self) -> dict[str, list[str]]:
        """The cells of the table, by workload."""
        begin, end = (plan_errors.MARK.format(it) for it in ("accuracy", "end of accuracy"))
        lines = self.page.partition(begin)[2].partition(end)[0].split("\n| ")[3:]
        rows = [line.strip().strip("|").split(" | ") for line in lines]
        return {name: [cell.strip() for cell in cells] for name, *cells in rows}

    def test_the_row_of_one_workload_is_computed_again(self) -> None:
        steps = list(plan_errors.step_rows("16k tokens"))
        assert len(steps) > 20
        table = plan_errors.accuracy_table(steps, list(plan_errors.peak_rows("16k tokens")))
        assert table.splitlines()[2] in self.page.splitlines()

    def test_every_row_with_both_is_counted(self) -> None:
        measured = Counter(
            it["workload"]
            for name in plan_errors.SHOWN
            for it in plan_errors.measured_rows(name)
            if it["column"] in plan_errors.COLUMNS and not it["spike"]
        )
        counts = {name: int(cells[0]) for name, cells in self.published().items()}
        assert {name: count for name, count in counts.items() if name in plan_errors.index()} == measured
        assert counts["all"] == measured.total() > 30

    def test_every_file_with_steps_of_a_gpu_is_used(self) -> None:
        named = {file.name for file in (ROOT / "benchmarks" / "results").glob("residency*.json")}
        assert named == set(plan_errors.RESULTS)

    def test_the_summary_is_that_of_the_rows(self) -> None:
        rows = self.published()
        total = rows.pop("all")
        same, other = rows["... traced in the same process"], rows["... traced in another process"]
        assert [int(a) + int(b) for a, b in zip(same[:2], other[:2], strict=True)] == [
            int(it) for it in total[:2]
        ]
        ours = [cells for name, cells in rows.items() if name in plan_errors.index()]
        assert sum(int(cells[1]) for cells in ours) == int(total[1])
        assert max(abs(int(cells[3][:-1])) for cells in ours) == abs(int(total[3][:-1]))
        assert max(abs(float(cells[4][:-1])) for cells in ours) <= abs(float(total[4][:-1])) <= 1.0

    def test_writing_needs_the_marks(self) -> None:
        with pytest.raises(ValueError, match="lacks"):
            plan_errors.written("no marks", {"accuracy": "| |"})
        assert plan_errors.written(self.page, {}) == self.page
