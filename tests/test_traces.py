"""Traces of accesses: reading, errors, drawing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torch_uvm import _C, cli, traces
from torch_uvm.cli import plot

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
    {"held": 50000},
    {"operator": "aten::add_", "time": 20, "in_place_ok": True, "reads": [9], "writes": []},
    {"transfer": "in_place", "storage": 8, "bytes": 100, "time": 20},
    {"transfer": "drop", "storage": 8, "bytes": 100, "time": 20},
    {"transfer": "write_back", "storage": 7, "bytes": 4096, "time": 21},
    {"death": 9},
    {"resident": 0, "device": 0},
]


def _legend(axes: Any) -> Any:
    legend = axes.get_legend()
    assert legend is not None
    return legend


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
            ({"ran": 1, "operators": 1, "us": 1}, "ran 1"),
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
        with pytest.raises(ValueError, match="line 7: time 1.0 is before"):
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
            (b"\xff\xfe\n", "line 1: this is not a trace of accesses.*UTF-8"),
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


#: Eight copies of 64 MiB, requested at once, each 1200 us on the link: 55.9 GB/s.
BURST: list[dict[str, Any]] = [
    {"storage": 7, "device": 0, "bytes": 64 << 20, "resident": True},
    {"operator": "aten::mm", "time": 0, "in_place_ok": False, "reads": [7], "writes": []},
    *(
        {"transfer": kind, "storage": 7, "bytes": 64 << 20, "time": 10}
        for kind in ["fetch", "write_back"] * 4
    ),
    *({"took": number, "us": 1200} for number in range(7)),
    {"transfer": "in_place", "storage": 7, "bytes": 64 << 20, "time": 11},
    {"operator": "aten::mm", "time": 500, "in_place_ok": False, "reads": [7], "writes": []},
]


class TestPlot:
    def test_no_rate_is_above_that_of_the_link(self, tmp_path: Path) -> None:
        """Copies are requested faster than the link carries them. The last one was not measured."""
        trace = traces.read_trace(_write(tmp_path / "trace", BURST))
        assert [it.took_us for it in trace.transfers] == [1200] * 7 + [None, None]
        link = (64 << 20) / 1200e-6
        for bins in (1, 3, 50, 400):
            width, rates = plot.link_rates(trace, 0, bins=bins)
            # Until the end of the last transfer: four fetches and a use in place, one after another.
            assert width * bins == pytest.approx(10 + 5 * 1200)
            into = [sum(pair) for pair in zip(rates["fetch"], rates["in_place"], strict=True)]
            assert max(into) <= link * 1.0001 and max(rates["write_back"]) <= link * 1.0001
            assert sum(into) * width * 1e-6 == pytest.approx(5 * (64 << 20))
            assert sum(rates["write_back"]) * width * 1e-6 == pytest.approx(4 * (64 << 20))

    def test_version_1_is_read_with_requested_rates(self, tmp_path: Path) -> None:
        trace = traces.read_trace(_write(tmp_path / "trace", RECORDS, {**HEADER, "version": 1}))
        assert not plot.is_measured(trace) and plot.is_measured(
            traces.read_trace(_write(tmp_path / "burst", BURST))
        )

    @pytest.mark.parametrize(("size", "unit"), [(12 << 20, "MiB"), (3 << 30, "GiB"), (6 << 10, "KiB")])
    def test_units_fit_and_legends_cover_no_data(self, tmp_path: Path, size: int, unit: str) -> None:
        pytest.importorskip("matplotlib")
        storage = {"storage": 7, "device": 0, "bytes": size, "resident": True}
        records = [storage, *(it for it in BURST[1:]), {"resident": size, "device": 0}]
        trace = traces.read_trace(_write(tmp_path / "trace", records, {**HEADER, "budgets": [size]}))
        figure = plot.make_figure(trace)
        figure.savefig(tmp_path / "picture.png")
        above, below = figure.axes
        assert above.get_ylabel() == unit and below.get_ylabel().startswith("link\nGB/s")
        assert any(f"budget, {_C.format_bytes(size)}" == it.get_text() for it in _legend(above).get_texts())
        assert 1 <= above.dataLim.ymax < 1024
        for axes in (above, below):
            assert _legend(axes).get_window_extent().x0 >= axes.get_window_extent().x1

    def test_contents_of_the_picture(self, tmp_path: Path) -> None:
        trace = traces.read_trace(_write(tmp_path / "trace", RECORDS))
        assert plot.live_bytes(trace, 0) == ([0.0, 1.0, 8.5], [4196, 4260, 4260])
        assert plot.resident_bytes(trace, 0) == ([1.0, 8.5], [4260, 0])
        width, rates = plot.link_rates(trace, 0, bins=10)
        assert width == pytest.approx(0.95)
        assert sum(rates["fetch"]) * width == pytest.approx(100e6)
        assert rates["fetch"][0] and not any(rates["fetch"][1:])
        assert sum(rates["write_back"]) * width == pytest.approx(4096e6)
        assert "drop" not in rates  # clean evictions cross no link
        assert plot.link_rates(trace, 1, bins=2)[1]["fetch"] == [0, 0]

    def test_picture(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        picture = tmp_path / "picture.png"
        assert cli.main(["plot", str(_write(tmp_path / "trace", RECORDS)), "-o", str(picture)]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000

    @pytest.mark.parametrize(
        ("records", "argv", "named"),
        [
            (RECORDS, ["--device", "3"], "device 3; it has [0]"),
            ([{"death": -1}], [], "line 2"),
            (RECORDS, ["-o", "picture.nothing"], "nothing"),
        ],
        ids=["device", "line", "format"],
    )
    def test_errors(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        records: list[Any],
        argv: list[str],
        named: str,
    ) -> None:
        if "-o" in argv:
            pytest.importorskip("matplotlib")
        path = _write(tmp_path / "trace", records)
        with pytest.raises(SystemExit) as caught:
            cli.main(["plot", str(path), "-o", str(tmp_path / "picture.png"), *argv])
        assert caught.value.code == 2 and named in capsys.readouterr().err

    def test_without_matplotlib_it_names_the_package(self, tmp_path: Path) -> None:
        script = (
            "import sys; sys.modules['matplotlib'] = None\n"
            "from torch_uvm.cli import main\nsys.exit(main(sys.argv[1:]))"
        )
        path = _write(tmp_path / "trace", RECORDS)
        argv = [sys.executable, "-c", script, "plot", str(path), "-o", str(tmp_path / "picture.png")]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1 and "pip install matplotlib" in done.stderr
        assert "Traceback" not in done.stderr
