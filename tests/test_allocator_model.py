"""The managed allocator against a model of it, in random walks.

Two machines share the model. On the recording runtime streams are held and released and calls are made
to fail; on the emulated runtime queued copies are delayed by a seeded schedule, so that a block handed
out too early is overwritten by its former owner.

HYPOTHESIS_PROFILE=ci, the default where CI is set, takes 100 000 steps; "dev", the default elsewhere, a
tenth. A failure prints the blob that @reproduce_failure takes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from torch_uvm._C import test_bindings as classes

KIB, MIB = 1024, 1024**2
HOST = classes.HOST
DEVICES = 2
#: Looked at on each side of a block's contents after every step.
EDGE = 256
#: Written on each side of a block's contents, and looked at before it is freed.
PATTERN = 4 * KIB
VALUES = 251
#: No request is rounded up to more than this above its size: the largest shared segment.
SEGMENT_SLACK = 20 * MIB
LIVE_AT_MOST = 40

_PROFILES = {"dev": (50, 100), "ci": (650, 100)}  # examples of each machine, steps of each
_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev")
if _PROFILE not in _PROFILES:
    raise ValueError(f"HYPOTHESIS_PROFILE={_PROFILE!r}; accepted: {', '.join(_PROFILES)}")
_EXAMPLES, _STEPS = _PROFILES[_PROFILE]
WALK = settings(
    max_examples=_EXAMPLES,
    stateful_step_count=_STEPS,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)

# Few sizes come often, so that cached blocks fit.
SMALL = st.one_of(st.sampled_from([1, 512, 4 * KIB, 64 * KIB, 512 * KIB, MIB]), st.integers(1, MIB))
LARGE = st.one_of(
    st.sampled_from([MIB + 1, 2 * MIB, 6 * MIB, 10 * MIB - 1, 10 * MIB, 12 * MIB]), st.integers(MIB, 24 * MIB)
)
HOMES = st.integers(HOST, DEVICES - 1)
VALUE = st.integers(0, VALUES - 1)
FAILING = st.one_of(
    st.none(),
    st.none(),
    st.none(),
    st.tuples(
        st.sampled_from(
            [
                "allocate_managed",
                "prefetch",
                "create_event",
                "record_event",
                "query_event",
                "synchronize_event",
                "wait_event",
                "synchronize_stream",
                "query_stream",
                "synchronize_device",
                "*",
            ]
        ),
        st.integers(1, 4),
    ),
)

OPTIONS = st.tuples(st.booleans(), st.sampled_from([None, 20 * MIB, 64 * MIB]))


Failing: TypeAlias = "tuple[str, int] | None"


@dataclass
class Live:
    """What the model knows of a block that it has."""

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
    probe: Any  # an event recorded on the stream that might, before the range was freed
    behind: set[Any]  # streams whose next work comes after that: this one, and those made to wait for it


class AllocatorModel(RuleBasedStateMachine):
    blocks = Bundle("blocks")
    runtime: Any
    #: The runtime does not tell what streams wait for: there a missing wait shows as changed contents only.
    unknown_order = False

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, Live] = {}
        self.hazards: list[Hazard] = []
        self.next_id = 0
        self.evict: list[int] = []  # ids that the room maker may free
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

    # --- what the two runtimes do differently ------------------------------------------------------------

    def write(self, live: Live) -> None:
        raise NotImplementedError

    def settle(self, live: Live) -> None:
        """Waits until all that was queued on the block is done."""
        for stream in live.users:
            self.runtime.synchronize_stream(stream)

    def arm(self, failing: Failing) -> Failing:
        """Makes a coming call fail, where the runtime can be made to. Returns what it was made to do."""
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
        """Frees a block, remembering who may still be using it."""
        live = self.live.pop(key)
        for stream in live.users:
            probe = self.runtime.create_event(stream.device)
            self.runtime.record_event(probe, stream)
            self.hazards.append(Hazard(live.begin, live.end, probe, {stream}))
        self.frees += 1
        self.arm(failing)
        live.block.free()  # must not throw, whatever fails
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

    # --- rules -------------------------------------------------------------------------------------------

    # Rules are drawn evenly: what should happen often is there more than once.

    @precondition(lambda self: len(self.live) < LIVE_AT_MOST)
    @rule(target=blocks, size=SMALL, home=HOMES, pick=st.integers(0, 1), value=VALUE)
    def allocate_small(self, size: int, home: int, pick: int, value: int) -> int:
        return self.allocate(size, home, pick, value, None)

    @precondition(lambda self: len(self.live) < LIVE_AT_MOST)
    @rule(target=blocks, size=LARGE, home=HOMES, pick=st.integers(0, 1), value=VALUE)
    def allocate_large(self, size: int, home: int, pick: int, value: int) -> int:
        return self.allocate(size, home, pick, value, None)

    @precondition(lambda self: len(self.live) < LIVE_AT_MOST)
    @rule(
        target=blocks,
        size=st.one_of(SMALL, LARGE),
        home=HOMES,
        pick=st.integers(0, 1),
        value=VALUE,
        failing=FAILING,
    )
    def allocate_failing(self, size: int, home: int, pick: int, value: int, failing: Failing) -> int:
        return self.allocate(size, home, pick, value, failing)

    def allocate(self, size: int, home: int, pick: int, value: int, failing: Failing) -> int:
        stream = self.stream_for(home, pick)
        self.forget_finished()
        failing = self.arm(failing)
        key, self.next_id = self.next_id, self.next_id + 1
        try:
            block = self.allocator.allocate(size, home, stream)
        except torch.OutOfMemoryError as error:
            self.disarm()
            self.ooms += 1
            assert str(error)
            if failing is None:
                reserved = self.runtime.managed_bytes
                assert self.limit is not None, "refused without a limit or a failure"
                assert reserved + size + SEGMENT_SLACK > self.limit, "refused although it would have fitted"
            return key
        except RuntimeError:
            self.disarm()
            assert failing is not None
            return key
        self.disarm()
        assert block is not None
        self.allocations += 1
        live = Live(block, size, home, stream, value, set() if home == HOST else {stream})
        others = list(self.live.values())
        self.live[key] = live
        self.sound = False
        assert live.begin % 512 == 0
        assert block.bytes >= block.requested_bytes == size
        assert (block.home, block.stream) == (home, stream)
        for other in others:
            assert live.end <= other.begin or other.end <= live.begin, "two callers have the same bytes"
        for hazard in self.hazards:
            overlaps = hazard.begin < live.end and live.begin < hazard.end
            if overlaps and not self.runtime.query_event(hazard.probe):
                assert home != HOST, "the host got memory that a device may still touch"
                assert self.unknown_order or stream in hazard.behind, (
                    "a stream got what another may still touch"
                )
        self.sound = True
        self.write(live)
        self.note_peak()
        return key

    @rule(key=consumes(blocks))
    def free(self, key: int) -> None:
        if key in self.live:
            self.drop(key)

    @rule(key=consumes(blocks), settled=st.booleans(), failing=FAILING)
    def free_failing(self, key: int, settled: bool, failing: Failing) -> None:
        if key not in self.live:
            return
        if settled:
            self.look(key)
        self.drop(key, failing)

    @rule(key=blocks, pick=st.integers(0, 2 * DEVICES - 1), failing=FAILING)
    def record_stream(self, key: int, pick: int, failing: Failing) -> None:
        if key not in self.live:
            return
        live, stream = self.live[key], self.streams[pick]
        failing = self.arm(failing)
        try:
            live.block.record_stream(stream)
        except RuntimeError:
            assert failing is not None
            return
        finally:
            self.disarm()
        live.users.add(stream)
        self.write(live)

    @rule(key=blocks, home=HOMES, pick=st.integers(0, 1), failing=FAILING)
    def set_home(self, key: int, home: int, pick: int, failing: Failing) -> None:
        self.move(key, home, self.stream_for(home, pick), failing)

    @rule(key=blocks, pick=st.integers(0, 2 * DEVICES - 1))
    def set_home_in_stream_order(self, key: int, pick: int) -> None:
        """A move to the host that a device's stream carries out: the host may not have the bytes before."""
        self.move(key, HOST, self.streams[pick], None)

    def move(self, key: int, home: int, stream: Any, failing: Failing) -> None:
        if key not in self.live:
            return
        live = self.live[key]
        failing = self.arm(failing)
        try:
            live.block.set_home(home, stream)
        except RuntimeError:
            assert failing is not None
            assert (live.block.home, live.block.stream) == (live.home, live.stream), "it failed and changed"
            return
        finally:
            self.disarm()
        assert (live.block.home, live.block.stream) == (home, stream)
        live.home, live.stream = home, stream
        if not stream.device == HOST:
            live.users.add(stream)

    def look(self, key: int) -> None:
        if key in self.live:
            live = self.live[key]
            self.settle(live)
            assert live.block.holds(live.value, PATTERN), "contents changed behind the owner's back"
            assert self.allocator.holds_address(live.begin + live.requested - 1)

    @rule(key=blocks, pick=st.integers(0, 2 * DEVICES - 1), look=st.booleans())
    def wait(self, key: int, pick: int, look: bool) -> None:
        if look:
            self.look(key)
        else:
            self.runtime.synchronize_stream(self.streams[pick])

    @rule(spare=st.sampled_from([None, None, 0, 0, 2 * MIB, 20 * MIB, 40 * MIB]), room=st.booleans())
    def squeeze(self, spare: int | None, room: bool) -> None:
        """A limit, or none; and perhaps somebody who makes room."""
        self.limit = None if spare is None else self.runtime.managed_bytes + spare
        self.runtime.limit = self.limit
        self.evict = list(self.live)[::3] if room else []
        self.allocator.set_pressure_callback(self.make_room if room else None)

    @rule(what=st.sampled_from(["cache", "peak", "sums", "options"]), failing=FAILING, options=OPTIONS)
    def keep_house(self, what: str, failing: Failing, options: tuple[bool, int | None]) -> None:
        if what == "cache":
            self.empty_cache(failing)
        elif what == "peak":
            self.allocator.reset_peak_statistics()
            self.peak = self.peak_count = 0
            self.note_peak()
        elif what == "sums":
            self.allocator.reset_accumulated_statistics()
            self.note_reset()
            self.allocations = self.frees = self.ooms = 0
        else:
            self.allocator.set_options(*options)

    def empty_cache(self, failing: Failing) -> None:
        before = self.runtime.managed_bytes
        failing = self.arm(failing)
        try:
            given = self.allocator.empty_cache()
        except RuntimeError:
            assert failing is not None
            return
        finally:
            self.disarm()
        assert given == before - self.runtime.managed_bytes
        if failing is None:
            for segment in self.allocator.snapshot():
                assert any(block["state"] == "allocated" for block in segment["blocks"]), (
                    "an unused segment stayed"
                )

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
            return  # a step failed half-way: more failures would hide which
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


class RecordingModel(AllocatorModel):
    """Calls fail, streams are held."""

    @initialize()
    def start_runtime(self) -> None:
        self.start(classes.RecordingRuntime(DEVICES))
        self.recorded: dict[int, list[Hazard]] = {}  # event handle -> what comes before it
        self.objects = self.runtime.live_objects()

    def write(self, live: Live) -> None:
        if live.requested <= 16 * PATTERN:
            live.block.fill(live.value)
            return
        pattern = bytes([live.value]) * PATTERN
        classes.write(live.begin, pattern)
        classes.write(live.begin + live.requested - PATTERN, pattern)

    def arm(self, failing: Failing) -> Failing:
        self.runtime.clear_calls()
        if failing is not None:
            self.runtime.fail(*failing)
        return failing

    def disarm(self) -> None:
        self.runtime.clear_failures()
        for call in self.runtime.calls():
            if call["failed"]:
                continue
            if call["name"] == "record_event":
                self.recorded[call["address"]] = [h for h in self.hazards if call["stream"] in h.behind]
            elif call["name"] == "wait_event":
                for hazard in self.recorded[call["address"]]:
                    hazard.behind.add(call["stream"])
            elif call["name"] == "free_managed":
                # It waits for what may still touch the range; the next mapping may lie there.
                self.forget_range(call["address"], call["address"] + call["bytes"])
        self.runtime.clear_calls()

    @rule(pick=st.integers(0, 2 * DEVICES - 1), hold=st.sampled_from([True, True, False]))
    def hold_or_release(self, pick: int, hold: bool) -> None:
        (self.runtime.hold if hold else self.runtime.release)(self.streams[pick])

    @invariant()
    def contents_are_intact(self) -> None:
        for live in self.live.values():
            assert live.block.holds(live.value, EDGE), "contents changed behind the owner's back"

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "objects") and self.sound:
            del self.allocator  # which keeps events for the next time
            assert self.runtime.live_objects() == self.objects, "events leaked"


class EmulatedModel(AllocatorModel):
    """Copies are late. Blocks are written by copies queued on their streams, the host's by the host."""

    unknown_order = True

    @initialize(seed=st.one_of(st.none(), st.integers(0, 2**32 - 1)))
    def start_runtime(self, seed: int | None) -> None:
        self.given_back = 0
        self.start(classes.EmulatedRuntime(DEVICES, 32 * MIB, seed=seed))

    def disarm(self) -> None:
        given_back = self.allocator.statistics()["num_device_free"]
        if given_back != self.given_back:
            # The runtime has waited for what might touch those segments, and new ones may lie there.
            self.forget(list(self.hazards))
        self.given_back = given_back

    def note_reset(self) -> None:
        self.given_back = 0

    def write(self, live: Live) -> None:
        count = min(live.requested, PATTERN)
        source = self.patterns + live.value * PATTERN
        for target in {live.begin, live.begin + live.requested - count}:
            if not live.users:
                classes.write(target, bytes([live.value]) * count)
            for stream in live.users:
                self.runtime.copy_async(target, source, count, stream)

    @invariant()
    def contents_of_the_host_are_intact(self) -> None:
        for live in self.live.values():
            if not live.users:
                assert live.block.holds(live.value, EDGE), "contents changed behind the owner's back"


@pytest.mark.parametrize("machine", [RecordingModel, EmulatedModel])
def test_allocator_agrees_with_its_model(machine: type[AllocatorModel]) -> None:
    run_state_machine_as_test(machine, settings=WALK)
