"""The managed allocator against a model of it, in random walks.

Two machines share the model. On the recording runtime, streams are held and released and calls are made to
fail. On the emulated runtime, queued copies are delayed by a seeded schedule, so a block that is reused too
early is overwritten by its previous owner.

HYPOTHESIS_PROFILE=ci, the default where CI is set, takes 100 000 steps; "dev", the default elsewhere, takes a
tenth. A failure prints the blob for @reproduce_failure.
"""

from __future__ import annotations

import os

import pytest
from _allocator_model import AllocatorModel
from _allocator_model_state import DEVICES, MIB, PATTERN, Failing, Hazard, Live
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from torch_uvm._C import test_bindings as classes

#: Bytes checked at each end of a block after every step.
EDGE = 256

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


class RecordingModel(AllocatorModel):
    """The recording runtime: calls fail, streams are held and released."""

    @initialize()
    def start_runtime(self) -> None:
        self.start(classes.RecordingRuntime(DEVICES))
        self.recorded: dict[int, list[Hazard]] = {}  # event handle -> hazards that precede it
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
                # free_managed waits for all work on the range, and the next mapping may reuse the range.
                self.forget_range(call["address"], call["address"] + call["bytes"])
        self.runtime.clear_calls()

    @rule(pick=st.integers(0, 2 * DEVICES - 1), hold=st.sampled_from([True, True, False]))
    def hold_or_release(self, pick: int, hold: bool) -> None:
        (self.runtime.hold if hold else self.runtime.release)(self.streams[pick])

    @invariant()
    def contents_are_intact(self) -> None:
        for live in self.live.values():
            assert live.block.holds(live.value, EDGE), "another allocation changed the contents"

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "objects") and self.sound:
            del self.allocator  # the allocator caches events
            assert self.runtime.live_objects() == self.objects, "events leaked"


class EmulatedModel(AllocatorModel):
    """The emulated runtime: copies are delayed. Copies write device blocks, the host writes host blocks."""

    unknown_order = True

    @initialize(seed=st.one_of(st.none(), st.integers(0, 2**32 - 1)))
    def start_runtime(self, seed: int | None) -> None:
        self.given_back = 0
        self.start(classes.EmulatedRuntime(DEVICES, 32 * MIB, seed=seed))

    def disarm(self) -> None:
        given_back = self.allocator.statistics()["num_device_free"]
        if given_back != self.given_back:
            # The runtime has waited for all work on freed segments, and new segments may reuse their ranges.
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
                assert live.block.holds(live.value, EDGE), "another allocation changed the contents"


@pytest.mark.parametrize("machine", [RecordingModel, EmulatedModel])
def test_allocator_agrees_with_its_model(machine: type[AllocatorModel]) -> None:
    run_state_machine_as_test(machine, settings=WALK)
