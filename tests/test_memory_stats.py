"""The statistics of managed memory, per home and in total."""

from __future__ import annotations

import base64
import gc
import pickle
import re
from collections.abc import Iterator

import pytest
import torch
from torch.cuda import _memory_viz

import torch_uvm
from torch_uvm import _C

ACCELERATOR = torch.accelerator.current_accelerator()
assert ACCELERATOR is not None
DEVICE = ACCELERATOR.type
MIB = 1024**2


@pytest.fixture(autouse=True)
def from_nothing() -> Iterator[None]:
    gc.collect()
    torch_uvm.memory.empty_cache()
    torch_uvm.memory.reset_peak_memory_stats()
    torch_uvm.memory.reset_accumulated_memory_stats()
    torch_uvm.enable()
    assert torch_uvm.memory.memory_allocated() == 0, "another test's tensor is alive"
    yield


def _device(mebibytes: int) -> torch.Tensor:
    return torch.empty(mebibytes, MIB, dtype=torch.uint8, device=DEVICE)


def _host(mebibytes: int) -> torch.Tensor:
    return torch_uvm.memory.empty(mebibytes, MIB, dtype=torch.uint8, device="cpu")


class TestLevels:
    def test_follow_tensors(self) -> None:
        x = _device(4)
        assert torch_uvm.memory.memory_allocated() == 4 * MIB
        view = x[1:]
        del x
        assert torch_uvm.memory.memory_allocated() == 4 * MIB, "a view keeps the bytes alive"
        del view
        assert torch_uvm.memory.memory_allocated() == 0
        assert torch_uvm.memory.max_memory_allocated() == 4 * MIB
        assert torch_uvm.memory.memory_reserved() >= 4 * MIB, "cached"
        assert torch_uvm.memory.empty_cache() >= 4 * MIB
        assert torch_uvm.memory.memory_reserved() == 0

    def test_ordinary_tensors_do_not_count(self) -> None:
        with torch_uvm.disabled():
            kept = _device(4)
        cpu = torch.empty(4 * MIB)
        assert torch_uvm.memory.memory_allocated() == 0
        del kept, cpu

    def test_figures_of_homes_add_up(self) -> None:
        x, y = _device(4), _host(3)
        assert torch_uvm.memory.memory_allocated("cpu") == 3 * MIB
        for device in (DEVICE, f"{DEVICE}:0", 0, torch.device(DEVICE, 0)):
            assert torch_uvm.memory.memory_allocated(device) == 4 * MIB
            assert torch_uvm.memory.memory_reserved(device) >= 4 * MIB
        total, host, there = (torch_uvm.memory.memory_stats(home) for home in (None, "cpu", 0))
        for key, value in total.items():
            if key.endswith(".current"):
                assert value == host[key] + there[key], key
        del x, y

    def test_reserved_is_what_the_runtime_allocated(self) -> None:
        x, y = _device(4), _host(30)
        assert torch_uvm.memory.memory_reserved() == _C.managed_bytes()
        del x, y

    def test_peaks_are_of_the_sum(self) -> None:
        x = _device(8)
        del x
        y = _host(8)
        assert torch_uvm.memory.max_memory_allocated() == 8 * MIB
        assert (
            torch_uvm.memory.max_memory_allocated("cpu") + torch_uvm.memory.max_memory_allocated(0)
            == 16 * MIB
        )
        del y


class TestResets:
    def test_of_peaks_everywhere_and_of_one_home(self) -> None:
        x, y = _device(4), _host(4)
        del x, y
        torch_uvm.memory.reset_peak_memory_stats("cpu")
        assert torch_uvm.memory.max_memory_allocated("cpu") == 0
        assert torch_uvm.memory.max_memory_allocated(0) == 4 * MIB
        assert torch_uvm.memory.max_memory_allocated() == 8 * MIB
        z = _device(2)
        torch_uvm.memory.reset_peak_memory_stats()
        for home in (None, 0):
            assert (
                torch_uvm.memory.max_memory_allocated(home)
                == torch_uvm.memory.memory_allocated(home)
                == 2 * MIB
            )
            assert torch_uvm.memory.max_memory_reserved(home) == torch_uvm.memory.memory_reserved(home)
        del z

    def test_of_sums_leave_levels(self) -> None:
        x = _device(4)
        before = torch_uvm.memory.memory_stats()
        assert before["allocated_bytes.all.allocated"] == 4 * MIB
        assert before["num_device_alloc"] >= 1
        torch_uvm.memory.reset_accumulated_memory_stats()
        after = torch_uvm.memory.memory_stats()
        assert after["allocated_bytes.all.allocated"] == after["num_device_alloc"] == 0
        assert torch_uvm.memory.memory_stats(0)["allocated_bytes.all.allocated"] == 0
        assert after["allocated_bytes.all.current"] == after["allocated_bytes.all.peak"] == 4 * MIB
        del x


class TestStats:
    def test_has_the_keys_of_cuda(self) -> None:
        stats = torch_uvm.memory.memory_stats()
        levels = ("allocation", "segment", "active", "inactive_split")
        sizes = (
            "allocated_bytes",
            "reserved_bytes",
            "active_bytes",
            "inactive_split_bytes",
            "requested_bytes",
        )
        expected = {
            f"{what}.{pool}.{figure}"
            for what in levels + sizes
            for pool in ("all", "small_pool", "large_pool")
            for figure in ("current", "peak", "allocated", "freed")
        }
        expected |= {
            "num_alloc_retries",
            "num_ooms",
            "num_sync_all_streams",
            "num_device_alloc",
            "num_device_free",
        }
        assert expected <= stats.keys()
        assert all(type(value) is int for value in stats.values())

    def test_counts_requested_and_allocated_bytes(self) -> None:
        x = torch.empty(1000, dtype=torch.uint8, device=DEVICE)
        stats = torch_uvm.memory.memory_stats(0)
        assert stats["requested_bytes.all.current"] == stats["requested_bytes.small_pool.current"] == 1000
        assert stats["allocated_bytes.all.current"] == 1024
        assert stats["allocation.all.current"] == 1
        del x

    def test_a_refusal_is_counted_and_names_the_bytes(self) -> None:
        torch_uvm.set_limit("1MiB")
        for make, home in ((_device, 0), (_host, "cpu")):
            with pytest.raises(torch.OutOfMemoryError, match=r"4\.00 MiB.*1\.00 MiB") as caught:
                make(4)
            assert "reserved" in str(caught.value)
            assert torch_uvm.memory.memory_stats(home)["num_ooms"] == 1
        assert torch_uvm.memory.memory_stats()["num_ooms"] == 2
        assert torch_uvm.memory.memory_allocated() == 0


class TestSnapshot:
    def test_agrees_with_the_statistics(self) -> None:
        kept = [_device(4), _host(2), torch.empty(100, device=DEVICE)]
        segments = torch_uvm.memory.memory_snapshot()
        assert sum(segment["total_size"] for segment in segments) == torch_uvm.memory.memory_reserved()
        assert sum(segment["allocated_size"] for segment in segments) == torch_uvm.memory.memory_allocated()
        blocks = [block for segment in segments for block in segment["blocks"]]
        active = {block["address"]: block for block in blocks if block["state"] == "active_allocated"}
        assert set(active) == {t.data_ptr() for t in kept}
        for t in kept:
            assert active[t.data_ptr()]["requested_size"] == t.nbytes
            assert active[t.data_ptr()]["device"] == (-1 if t.device.type == "cpu" else 0)
        for segment in segments:
            assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]

    def test_pytorchs_viewer_accepts_it(self) -> None:
        kept = [_device(4), _host(2), torch.empty(100, device=DEVICE)]
        segments = torch_uvm.memory.memory_snapshot()
        snapshot = {"segments": segments, "device_traces": [[]]}
        allocated = torch_uvm.memory.memory_allocated()
        text = _memory_viz.segsum(snapshot)
        assert f"segments: {len(segments)}\n" in text
        assert f"total_allocated: {_memory_viz.Bytes(allocated)}\n" in text
        page = _memory_viz.segment_plot(snapshot)
        [packed] = re.findall(r'"base64": ?"([A-Za-z0-9+/=]+)"', page)
        shown = pickle.loads(base64.b64decode(packed))
        names = {frame["name"] for s in shown["segments"] for b in s["blocks"] for frame in b["frames"]}
        assert names == {"managed memory, made for device 0", "managed memory, made for the host"}
        del kept

    def test_of_one_home(self) -> None:
        kept = [_device(4), _host(2)]
        assert [segment["device"] for segment in torch_uvm.memory.memory_snapshot("cpu")] == [-1]
        assert [segment["device"] for segment in torch_uvm.memory.memory_snapshot(DEVICE)] == [0]
        del kept


class TestFragmentation:
    def test_agrees_with_the_statistics(self) -> None:
        tensors = [_device(3) for _ in range(6)]
        host = _host(2)
        del tensors[1], tensors[2]
        found = torch_uvm.memory.memory_fragmentation()
        stats = torch_uvm.memory.memory_stats()
        for name in ("reserved", "allocated", "requested", "inactive_split"):
            assert found[f"{name}_bytes"] == stats[f"{name}_bytes.all.current"], name
        assert found["rounding_bytes"] == found["allocated_bytes"] - found["requested_bytes"]
        assert found["free_bytes"] == found["inactive_split_bytes"] + found["unused_segment_bytes"]
        assert found["free_bytes"] == sum(row["bytes"] for row in found["pieces"])
        assert 0 < found["largest_free_bytes"] <= found["free_bytes"]
        assert 0 <= found["share_outside_largest"] < 1
        assert found["unused_segment_bytes"] == torch_uvm.memory.empty_cache()
        del tensors, host

    def test_of_one_home(self) -> None:
        host = _host(2)
        assert torch_uvm.memory.memory_fragmentation("cpu")["allocated_bytes"] == 2 * MIB
        assert torch_uvm.memory.memory_fragmentation(DEVICE)["allocated_bytes"] == 0
        del host

    def test_is_in_the_summary(self) -> None:
        x = torch.empty(100, device=DEVICE)  # the rest of its segment is a free piece
        table = torch_uvm.memory.memory_fragmentation()["table"]
        assert "pieces from" in table and table in torch_uvm.memory_summary()
        assert "pieces from" not in torch_uvm.memory_summary(abbreviated=True)
        del x

    def test_without_memory(self) -> None:
        torch_uvm.memory.empty_cache()
        found = torch_uvm.memory.memory_fragmentation()
        assert found["free_bytes"] == 0 and found["share_outside_largest"] == 0


class TestSummary:
    def test_has_budgets_pinned_memory_and_transfers(self) -> None:
        torch_uvm.set_budget("8MiB")
        torch_uvm.set_host_limit("96MiB")
        torch_uvm.memory.reset_residency_stats()
        kept = [_device(4).zero_() for _ in range(4)]  # written, so that an eviction has to copy them
        for x in kept:
            x.add_(1)
        stats = torch_uvm.stats()
        summary = torch_uvm.memory_summary()
        assert "budget of device 0: 8.00 MiB (requested: 8MiB); reserved" in summary
        pinned = _C.format_bytes(stats["host_bytes"])
        assert f"pinned host memory: {pinned}; host limit: 96.00 MiB" in summary
        rows = {line[:29].strip(): line[29:].split() for line in summary.splitlines()}
        for key in ("fetched", "written_back", "dropped_clean", "used_in_place"):
            shown = _C.format_bytes(stats[key]["bytes"]).split()
            assert rows[key][:3] == [str(stats[key]["count"]), *shown], key
        assert rows["over_budget"] == [str(stats["over_budget"])]
        assert min(stats["fetched"]["count"], stats["written_back"]["count"], stats["host_bytes"]) > 0, stats
        torch_uvm.set_host_limit(None)
        torch_uvm.set_budget(None)
        assert "budget of device 0: none" in torch_uvm.memory_summary(0)
        del kept

    def test_shows_the_figures(self) -> None:
        torch_uvm.set_limit("512MiB")
        x = _device(4)
        summary = torch_uvm.memory_summary()
        assert "all homes" in summary and "512.00 MiB" in summary
        rows = {line[:23].strip(): line[23:].split("  ") for line in summary.splitlines()}
        assert "4.00 MiB" in [cell.strip() for cell in rows["allocated_bytes"]]
        assert "host" in torch_uvm.memory_summary("cpu") and f"{DEVICE}:0" in torch_uvm.memory_summary(0)
        del x
