"""The rules of the allocator's model: allocations, frees, moves, waits, limits and housekeeping."""

from __future__ import annotations

from typing import Any

import torch
from _allocator_model_state import DEVICES, HOST, KIB, MIB, VALUES, Failing, Live, ModelState
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, precondition, rule

#: Upper bound of the bytes that rounding adds to a request: the largest shared segment.
SEGMENT_SLACK = 20 * MIB
LIVE_AT_MOST = 40

# Few sizes, drawn often, so that cached blocks fit.
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


class AllocatorModel(ModelState):
    blocks = Bundle("blocks")

    # Rules are drawn evenly, so a rule that should run often exists more than once.

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
                assert home != HOST, "the host got memory that a device may still access"
                assert self.unknown_order or stream in hazard.behind, (
                    "a stream got memory that another may still access"
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
        """A move to the host, ordered on a device's stream: the host may use the bytes after that stream."""
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

    @rule(key=blocks, pick=st.integers(0, 2 * DEVICES - 1), look=st.booleans())
    def wait(self, key: int, pick: int, look: bool) -> None:
        if look:
            self.look(key)
        else:
            self.runtime.synchronize_stream(self.streams[pick])

    @rule(spare=st.sampled_from([None, None, 0, 0, 2 * MIB, 20 * MIB, 40 * MIB]), room=st.booleans())
    def squeeze(self, spare: int | None, room: bool) -> None:
        """Sets or lifts a limit, and sets or removes a memory-pressure callback."""
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
