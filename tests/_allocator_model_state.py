"""State of the allocator's model: live blocks, freed ranges that may still be in use, and counts.

The invariants compare the allocator with this state after every step. _allocator_model.py adds the rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hypothesis.stateful import RuleBasedStateMachine, invariant

from torch_uvm._C import test_bindings as classes

KIB, MIB = 1024, 1024**2
HOST = classes.HOST
DEVICES = 2
#: Bytes written at each end of a block. The model checks them before it frees the block.
PATTERN = 4 * KIB
VALUES = 251

Failing: TypeAlias = "tuple[str, int] | None"


@dataclass
class Live:
    """A live block, and the values that the model expects of it."""

    block: classes.Block
    requested: int
    home: int
    stream: Any
    value: int
    users: set[Any] = field(default_factory=set)  # device streams whose work may touch it

    @property
    def begin(self) -> int:
        return self.block.address

    @property
    def end(self) -> int:
        return self.block.address + self.block.bytes


@dataclass
class Hazard:
    """A range that was freed while a stream might still touch it."""

    begin: int
    end: int
    probe: Any  # an event recorded on that stream before the range was freed
    behind: set[Any]  # streams whose later work is ordered after the probe: its own, and waiting ones


class ModelState(RuleBasedStateMachine):
    runtime: Any
    #: True if the runtime does not report the order of streams. A missing wait then only changes contents.
    unknown_order = False

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, Live] = {}
        self.hazards: list[Hazard] = []
        self.next_id = 0
        self.evict: list[int] = []  # ids that the memory-pressure callback may free
        self.limit: int | None = None
        self.sound = True
        self.peak = self.peak_count = 0
        self.allocations = self.frees = self.ooms = 0

    def start(self, runtime: Any) -> None:
        self.runtime = runtime
        self.patterns = runtime.allocate_managed(VALUES * PATTERN, HOST)
        for value in range(VALUES):
            classes.write(self.patterns + value * PATTERN, bytes([value]) * PATTERN)
        self.base = runtime.managed_bytes
        self.allocator = classes.Allocator(runtime)
        self.streams = [
            stream
            for device in range(DEVICES)
            for stream in (classes.Stream.default_of(device), runtime.create_stream(device))
        ]

    # --- differences between the two runtimes -------------------------------------------------------------

    def write(self, live: Live) -> None:
        raise NotImplementedError

    def settle(self, live: Live) -> None:
        """Waits until all queued work on the block is done."""
        for stream in live.users:
            self.runtime.synchronize_stream(stream)

    def arm(self, failing: Failing) -> Failing:
        """Makes a later call fail, if the runtime supports that. Returns the failure that was arranged."""
        return None

    def disarm(self) -> None:
        """No call fails any more. The model's own calls never fail."""

    def note_reset(self) -> None:
        """The allocator's counts are 0 again."""

    # --- model -------------------------------------------------------------------------------------------

    def stream_for(self, home: int, pick: int) -> Any:
        return classes.Stream.host() if home == HOST else self.streams[2 * home + pick]

    def forget_finished(self) -> None:
        self.forget([hazard for hazard in self.hazards if self.runtime.query_event(hazard.probe)])

    def forget_range(self, begin: int, end: int) -> None:
        self.forget([hazard for hazard in self.hazards if begin <= hazard.begin < end])

    def forget(self, hazards: list[Hazard]) -> None:
        for hazard in hazards:
            self.runtime.destroy_event(hazard.probe)
            self.hazards.remove(hazard)

    def drop(self, key: int, failing: Failing = None) -> None:
        """Frees a block. Each stream that may still use its range becomes a hazard."""
        live = self.live.pop(key)
        for stream in live.users:
            probe = self.runtime.create_event(stream.device)
            self.runtime.record_event(probe, stream)
            self.hazards.append(Hazard(live.begin, live.end, probe, {stream}))
        self.frees += 1
        self.arm(failing)
        live.block.free()  # must not throw, even if runtime calls fail
        self.disarm()

    def make_room(self, wanted: int, home: int) -> bool:
        assert wanted > 0 and HOST <= home < DEVICES
        self.disarm()  # the model's own calls must not fail
        while self.evict:
            key = self.evict.pop()
            if key in self.live:
                self.drop(key)
                return True
        return False

    def note_peak(self) -> None:
        self.peak = max(self.peak, sum(one.block.bytes for one in self.live.values()))
        self.peak_count = max(self.peak_count, len(self.live))

    def look(self, key: int) -> None:
        if key in self.live:
            live = self.live[key]
            self.settle(live)
            assert live.block.holds(live.value, PATTERN), "another allocation changed the contents"
            assert self.allocator.holds_address(live.begin + live.requested - 1)

    # --- after every step ----------------------------------------------------------------------------------

    @invariant()
    def structures_are_whole(self) -> None:
        assert self.allocator.check() is None

    @invariant()
    def statistics_agree(self) -> None:
        stats = self.allocator.statistics()
        held = sum(one.block.bytes for one in self.live.values())
        assert stats["allocation.all.current"] == len(self.live)
        assert stats["allocated_bytes.all.current"] == held
        assert stats["requested_bytes.all.current"] == sum(one.requested for one in self.live.values())
        assert stats["reserved_bytes.all.current"] == self.runtime.managed_bytes - self.base
        assert stats["active_bytes.all.current"] >= held
        assert stats["allocated_bytes.all.peak"] == self.peak
        assert stats["allocation.all.peak"] == self.peak_count
        assert stats["allocation.all.allocated"] == self.allocations
        assert stats["allocation.all.freed"] == self.frees
        assert stats["num_ooms"] == self.ooms
        homes = {home: self.allocator.statistics(home) for home in range(HOST, DEVICES)}
        for home, figures in homes.items():
            here = [one for one in self.live.values() if one.home == home]
            assert figures["allocation.all.current"] == len(here)
            assert figures["allocated_bytes.all.current"] == sum(one.block.bytes for one in here)
        for key, value in stats.items():
            if key.endswith(".current"):
                assert value == sum(figures[key] for figures in homes.values()), key
            what, _, rest = key.partition(".all.")
            if rest in ("current", "allocated", "freed"):
                assert value == stats[f"{what}.small_pool.{rest}"] + stats[f"{what}.large_pool.{rest}"], key

    @invariant()
    def blocks_tile_segments(self) -> None:
        snapshot = self.allocator.snapshot()
        seen = {}
        end_of_last = 0
        for segment in snapshot:
            assert segment["address"] >= end_of_last, "segments overlap"
            end_of_last = segment["address"] + segment["bytes"]
            expected = segment["address"]
            for block in segment["blocks"]:
                assert block["address"] == expected, "a gap or an overlap"
                expected += block["bytes"]
                if block["state"] == "allocated":
                    seen[block["address"]] = block
            assert expected == end_of_last
        assert sum(segment["bytes"] for segment in snapshot) == self.runtime.managed_bytes - self.base
        assert len(seen) == len(self.live)
        for live in self.live.values():
            block = seen[live.begin]
            assert block["bytes"] == live.block.bytes
            assert (block["requested_bytes"], block["home"]) == (live.requested, live.home)

    def teardown(self) -> None:
        if not (hasattr(self, "allocator") and self.sound):
            return  # a step failed half-way: further failures would hide it
        self.disarm()
        self.allocator.set_pressure_callback(None)
        for key in list(self.live):
            self.look(key)
            self.drop(key)
        for stream in self.streams:
            self.runtime.synchronize_stream(stream)
        self.forget_finished()
        assert not self.hazards
        self.allocator.empty_cache()
        assert self.allocator.check() is None
        assert self.runtime.managed_bytes == self.base, "segments leaked"
