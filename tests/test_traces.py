"""Traces of accesses: reading, errors, drawing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torch_uvm import cli, traces
from torch_uvm.cli import plot
from torch_uvm.report.samples import MOST_SAMPLES

HEADER: dict[str, Any] = {
    "format": "torch_uvm accesses",
    "version": 5,
    "units": {"time": "us", "size": "bytes"},
    "budgets": [1 << 30, None],
}
RECORDS: list[dict[str, Any]] = [
    {"storage": 7, "device": 0, "bytes": 4096, "resident": True},
    {"storage": 8, "device": 0, "bytes": 100, "resident": False},
    {"transfer": "fetch", "storage": 8, "bytes": 100, "time": 11.5},
    {"operator": "aten::mm", "time": 12.5, "in_place_ok": False, "reads": [7], "writes": [8]},
    {"birth": 9, "device": 0, "bytes": 64},
    {"ran": 0, "operators": 1, "us": 7.5},
    {"resident": 4260, "device": 0},
    {"step": "end"},
    {"held": 1000},
    {"operator": "aten::add_", "time": 20, "in_place_ok": True, "reads": [9], "writes": []},
    {"transfer": "in_place", "storage": 8, "bytes": 100, "time": 20},
    {"transfer": "drop", "storage": 8, "bytes": 100, "time": 20},
    {"transfer": "write_back", "storage": 7, "bytes": 4096, "time": 21},
    {"death": 9},
    {"resident": 0, "device": 0},
]


def _write(path: Path, records: list[Any], header: Any = HEADER) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in [header, *records]))
    return path


class TestRead:
    def test_all_records(self, tmp_path: Path) -> None:
        trace = traces.read_trace(_write(tmp_path / "trace", RECORDS))
        assert trace.budgets == (1 << 30, None)
        assert trace.storages[7] == traces.Storage(0, 4096, True)
        assert [op.name for op in trace.operators] == ["aten::mm", "aten::add_"]
        assert trace.operators[0].writes == (8,) and trace.operators[0].births == [9]
        assert trace.operators[1].deaths == [9] and trace.operators[1].in_place_ok
        assert [it.kind for it in trace.transfers] == ["fetch", "in_place", "drop", "write_back"]
        assert [it.operators for it in trace.transfers] == [0, 2, 2, 2]
        assert trace.groups == [traces.OperatorGroup(0, 1, 7.5)]
        assert trace.resident[0] == traces.Resident(0, 4260, 1)
        assert trace.steps == [1] and trace.holds == [1]
        assert trace.begin_us == 11.5

    def test_an_operator_is_timed_once(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="operator 0 is timed already"):
            traces.read_trace(_write(tmp_path / "trace", [*RECORDS, {"ran": 0, "operators": 2, "us": 1}]))

    def test_unused_storages_may_be_freed(self, tmp_path: Path) -> None:
        trace = traces.read_trace(_write(tmp_path / "trace", [*RECORDS, {"death": 99}]))
        assert trace.operators[-1].deaths == [9]

    def test_the_first_record_of_a_storage_counts(self, tmp_path: Path) -> None:
        again = {"storage": 7, "device": 0, "bytes": 4096, "resident": False}
        assert traces.read_trace(_write(tmp_path / "trace", [RECORDS[0], again])).storages[7].resident

    @pytest.mark.parametrize(
        ("record", "named"),
        [
            ([], "an object"),
            ({}, "an object"),
            ({"teleport": 7}, "unknown record 'teleport'"),
            ({"death": 7, "why": "old"}, "expected death"),
            ({"death": -1}, "-1"),
            ({"death": True}, "True"),
            ({"death": "7"}, "'7'"),
            ({"death": 2**64}, str(2**64)),
            ({"storage": 1, "device": 0, "bytes": -4, "resident": True}, "bytes -4"),
            ({"storage": 1, "device": 0, "bytes": 2**63, "resident": True}, "bytes"),
            ({"storage": 1, "device": 0, "bytes": 1.5, "resident": True}, "bytes 1.5"),
            ({"storage": 1, "device": 5000, "bytes": 1, "resident": True}, "device 5000"),
            ({"storage": 1, "device": 0, "bytes": 1, "resident": 1}, "resident 1"),
            ({"birth": 7, "device": 0, "bytes": 1}, "created a second time"),
            ({"transfer": "beam", "storage": 7, "bytes": 1, "time": 1}, "'beam'"),
            ({"transfer": ["fetch"], "storage": 7, "bytes": 1, "time": 1}, "transfer"),
            ({"transfer": "fetch", "storage": 99, "bytes": 1, "time": 1}, "storage 99"),
            ({"transfer": "fetch", "storage": 7, "bytes": 1, "time": float("nan")}, "time nan"),
            ({"transfer": "fetch", "storage": 7, "bytes": 1, "time": -1}, "time -1"),
            ({"operator": 3, "time": 1, "in_place_ok": True, "reads": [], "writes": []}, "operator 3"),
            ({"operator": "x", "time": 1, "in_place_ok": True, "reads": {}, "writes": []}, "reads"),
            ({"operator": "x", "time": 1, "in_place_ok": True, "reads": [99], "writes": []}, "99"),
            ({"operator": "x", "time": 1, "in_place_ok": True, "reads": [None], "writes": []}, "None"),
            ({"resident": 1, "device": None}, "device None"),
            ({"step": "begin"}, "'begin'"),
            ({"took": 0, "us": 1}, "transfer 0 is unknown"),
            ({"ran": 0, "operators": 1, "us": 1}, "1 operators from number 0; 0 have begun"),
            ({"ran": 1, "operators": 1, "us": 1}, "from number 1"),
            ({"ran": 0, "operators": 0, "us": 1}, "0 operators"),
        ],
        ids=repr,
    )
    def test_refuses_by_line(self, tmp_path: Path, record: Any, named: str) -> None:
        path = _write(tmp_path / "trace", [RECORDS[0], record])
        with pytest.raises(ValueError) as caught:
            traces.read_trace(path)
        assert f"{path}, line 3: " in str(caught.value) and named in str(caught.value)
        assert len(str(caught.value)) < 500 + len(str(path))

    def test_time_does_not_run_backwards(self, tmp_path: Path) -> None:
        earlier = {"operator": "x", "time": 1, "in_place_ok": True, "reads": [], "writes": []}
        with pytest.raises(ValueError, match="line 7: time 1 is before"):
            traces.read_trace(_write(tmp_path / "trace", [*RECORDS[:5], earlier]))

    @pytest.mark.parametrize(
        "header",
        [
            {},
            7,
            {"death": 7},
            {**HEADER, "format": "other"},
            {**HEADER, "version": 6},
            {**HEADER, "version": True},
            {**HEADER, "units": {"time": "s", "size": "bytes"}},
            {**HEADER, "budgets": 5},
            {**HEADER, "budgets": ["5"]},
            {"format": "torch_uvm accesses"},
        ],
        ids=repr,
    )
    def test_refuses_other_headers(self, tmp_path: Path, header: Any) -> None:
        with pytest.raises(ValueError, match="line 1: "):
            traces.read_trace(_write(tmp_path / "trace", [], header))

    @pytest.mark.parametrize(
        ("content", "named"),
        [
            (b"", "empty"),
            (b"\n", "line 1"),
            (b"no json\n", "line 1: this is not a trace of accesses.*record_accesses.*'no json"),
            (b"import torch\n", "line 1: this is not a trace of accesses.*'import torch"),
            (b"\xff\xfe\n", "line 1: this is not a trace of accesses.*utf-8"),
            (b"[" * 100_000 + b"\n", "line 1"),
            (b'{"format": "torch_uvm accesses"', "cut off"),
        ],
        ids=["empty", "blank", "text", "script", "not UTF-8", "deep", "cut off"],
    )
    def test_refuses_files_that_are_no_trace(self, tmp_path: Path, content: bytes, named: str) -> None:
        path = tmp_path / "trace"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=named):
            traces.read_trace(path)

    def test_reports_an_incomplete_recording(self, tmp_path: Path) -> None:
        path = _write(tmp_path / "trace", RECORDS)
        path.write_bytes(path.read_bytes()[:-4])
        with pytest.raises(ValueError, match="cut off"):
            traces.read_trace(path)


class TestPlot:
    def test_what_is_drawn(self, tmp_path: Path) -> None:
        found = plot.samples_of(traces.read_trace(_write(tmp_path / "trace", RECORDS)), 0)
        assert [it.seconds * 1e6 for it in found[-2:]] == pytest.approx([9.5, 9.5])
        assert found[0].host == 4196 and max(it.resident[0] for it in found) == 4260
        assert max(it.resident[0] + it.host for it in found) == 4260
        last = found[-1].totals
        assert (last["fetched.bytes"], last["written_back.bytes"], last["used_in_place.bytes"]) == (
            100,
            4096,
            100,
        )

    def test_samples_are_bounded_and_keep_peaks(self, tmp_path: Path) -> None:
        levels = [{"resident": 5000 if at == 1234 else at % 100, "device": 0} for at in range(5000)]
        trace = traces.read_trace(_write(tmp_path / "trace", [*RECORDS, *levels]))
        found = plot.samples_of(trace, 0)
        assert len(found) <= MOST_SAMPLES and max(it.resident[0] for it in found) == 5000

    def test_page(self, tmp_path: Path) -> None:
        page = tmp_path / "page.html"
        assert cli.main(["tools", "plot", str(_write(tmp_path / "trace", RECORDS)), "-o", str(page)]) == 0
        said = page.read_text()
        assert said.count("<svg") == 2 and "device 0, 2 operators, 4 transfers" in said
        assert "budget, 1.00 GiB" in said and "<script" not in said

    @pytest.mark.parametrize(
        ("records", "argv", "named"),
        [
            (RECORDS, ["--device", "3"], "device 3; it has [0]"),
            ([{"death": -1}], [], "line 2"),
            (RECORDS, ["-o", "nowhere/page.html"], "nowhere"),
        ],
        ids=["device", "line", "folder"],
    )
    def test_errors(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        records: list[Any],
        argv: list[str],
        named: str,
    ) -> None:
        path = _write(tmp_path / "trace", records)
        with pytest.raises(SystemExit) as caught:
            cli.main(["tools", "plot", str(path), "-o", str(tmp_path / "page.html"), *argv])
        assert caught.value.code == 2 and named in capsys.readouterr().err
