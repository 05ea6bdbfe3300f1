"""Recorded durations on a GPU whose host is slow."""

from __future__ import annotations

from pathlib import Path

from _spawn import Spawn

from torch_uvm.traces import read_trace

STEPS, PAUSE_MS = 6, 2.0


def test_behind_the_first_hold_durations_are_the_devices(spawn: Spawn, tmp_path: Path) -> None:
    """The host sleeps between operators. That is in the first durations, and not in the last ones."""
    spawn(
        f"""
        import time, torch, torch_uvm
        torch_uvm.enable(budget="1GiB")
        x, y = (torch.ones(16 << 20, device="cuda") for _ in range(2))
        def step():
            for number, change in enumerate((x.mul_, x.add_, x.sub_, x.div_, y.mul_, y.add_, y.sub_, y.div_)):
                change(1)
                time.sleep({PAUSE_MS} / 1e3)
            torch_uvm.step()
        for _ in range(4):
            step()
        with torch_uvm.tools.record_accesses("trace"):
            for _ in range({STEPS}):
                step()
        """
    )
    trace = read_trace(tmp_path / "trace")
    size, rest = divmod(len(trace.operators), STEPS)
    assert rest == 0 and not trace.transfers
    assert trace.holds and 2 * size <= trace.holds[0] < 4 * size
    took = [sum(it.us for it in trace.groups if it.first // size == step) / 1e3 for step in range(STEPS)]
    waits = (size - 1) * PAUSE_MS  # the host's, within a step
    assert min(took[:2]) > waits
    assert min(took[-2:]) < waits / 4
