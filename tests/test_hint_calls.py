"""The hints as operators, under fake tensors and torch.compile, on streams and devices, after a fork."""

# torch has no stub for torch.emu; wrong arguments are the point of some tests.
# mypy: disable-error-code="arg-type, attr-defined, call-arg, misc, override"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _spawn import Spawn

import torch_uvm
from torch_uvm import advise, discard, emulated, prefetch, residency

EMU = torch.device("emu:0")
CPU = torch.device("cpu")
MIB = 2**20
OPERATOR_CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "prefetch": ("prefetch", (CPU,), {}),
    "prefetch to the label": ("prefetch", (), {}),
    "advise": ("advise", (), {"read_mostly": True, "preferred_location": [], "accessed_by": [0, -1]}),
    "discard": ("discard", (), {}),
}


@pytest.mark.parametrize("device", ["cpu", "emu"])
@pytest.mark.parametrize("call", OPERATOR_CALLS.values(), ids=OPERATOR_CALLS)
def test_operators_pass_opcheck(call: tuple[str, tuple[Any, ...], dict[str, Any]], device: str) -> None:
    name, arguments, keywords = call
    operator = getattr(torch.ops.torch_uvm, name).default
    tensors = [torch_uvm.memory.ones(1000, device=device), torch_uvm.memory.ones(4, 5, device=device).t()]
    results = torch.library.opcheck(operator, (tensors, *arguments), keywords)
    assert set(results.values()) == {"SUCCESS"}


def test_fake_tensors_take_hints() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    emulated.reset_counters()
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(MIB))
        prefetch([x], "cpu")
        advise([x], read_mostly=True)
        discard([x])
        torch.ops.torch_uvm.prefetch([x], EMU)
        with pytest.raises(ValueError, match="not managed"):
            prefetch(x)
        with pytest.raises(ValueError, match="memory of their own"):
            residency(x)
    assert emulated.counters()["prefetch_calls"] == 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
class TestCompiled:
    def test_public_functions(self, backend: str) -> None:
        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            prefetch(y, "cpu")
            advise(y, read_mostly=True)
            return y + 1

        self.check(step, backend, fullgraph=False)

    def test_operators_are_traced_and_not_removed(self, backend: str) -> None:
        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            torch.ops.torch_uvm.prefetch([y], CPU)
            torch.ops.torch_uvm.advise([y], read_mostly=True)
            return y + 1

        self.check(step, backend, fullgraph=True)

    def test_discard(self, backend: str) -> None:
        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            torch.ops.torch_uvm.discard([y])
            y.copy_(x)
            return y + 1

        x = torch_uvm.memory.ones(MIB)
        with torch_uvm.enabled():
            assert torch.equal(torch.compile(step, backend=backend)(x).cpu(), step(x).cpu())

    def check(self, step: Callable[[torch.Tensor], torch.Tensor], backend: str, fullgraph: bool) -> None:
        torch.compiler.reset()
        with torch_uvm.enabled():
            for requires_grad in (False, True):
                x = torch_uvm.memory.ones(MIB).requires_grad_(requires_grad)
                expected = step(x)
                compiled = torch.compile(step, backend=backend, fullgraph=fullgraph)
                result = compiled(x)
                emulated.reset_counters()
                assert torch.equal(compiled(x).cpu(), expected.cpu())
                counters = emulated.counters()
                assert counters["prefetch_calls"] >= 1 and counters["advise_calls"] >= 1
                if requires_grad:
                    result.sum().backward()
                    assert x.grad is not None and bool((x.grad.cpu() == 2).all())


def test_importing_does_not_load_the_compiler(spawn: Spawn) -> None:
    spawn("""
        import sys, torch
        before = set(sys.modules)
        import torch_uvm
        loaded = {name for name in set(sys.modules) - before if name.startswith("torch.")}
        assert not any("_dynamo" in name or "_inductor" in name for name in loaded), loaded
    """)


class TestStreams:
    def test_prefetch_is_ordered_on_the_given_stream(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch, torch_uvm
            from torch_uvm import _C, emulated
            from torch_uvm import prefetch
            emu = torch.device("emu:0")
            xs = [torch_uvm.memory.ones(1 << 19, device="cpu") for _ in range(12)]
            stream = torch.Stream("emu")
            for x in xs:
                prefetch(x, emu, stream=stream)
            assert _C.emu_pending_operations() > 0
            stream.synchronize()
            assert _C.emu_pending_operations() == 0
            for x in xs:
                assert emulated.residency(x) == {emu: 1 << 21}
            with stream:  # the current stream by default; for a move to the host, the device's current stream
                for x in xs:
                    prefetch(x, "cpu")
            stream.synchronize()
            assert _C.emu_pending_operations() == 0
            assert all(emulated.residency(x) == {torch.device("cpu"): 1 << 21} for x in xs)
            """,
            env={"TORCH_UVM_CONF": "emulated_schedule_seed:5"},
        )

    def test_prefetch_removes_no_wait(self, spawn: Spawn) -> None:
        """A move to the CPU waits for the writing stream, even after a hint on another stream."""
        spawn(
            """
            import torch, torch_uvm
            from torch_uvm import prefetch
            source = torch.arange(1 << 20, dtype=torch.float32).pin_memory("emu")
            for _ in range(12):
                writer, other = torch.Stream("emu"), torch.Stream("emu")
                with writer:
                    x = torch_uvm.memory.empty(1 << 20)
                    x.copy_(source, non_blocking=True)
                prefetch(x, "cpu", stream=other)
                prefetch(x, "emu", stream=other)
                assert torch.equal(torch_uvm.to(x, "cpu"), source)
            """,
            env={"TORCH_UVM_CONF": "emulated_schedule_seed:5"},
        )

    def test_discard_of_a_cpu_label_is_synchronous(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch, torch_uvm
            from torch_uvm import _C
            from torch_uvm import discard
            xs = [torch_uvm.memory.ones(1 << 19) for _ in range(12)]
            torch.accelerator.synchronize()
            for x in xs:
                discard(x)
            assert _C.emu_pending_operations() > 0
            torch.accelerator.synchronize()
            for y in [torch_uvm.to(x, "cpu") for x in xs]:
                discard(y)
                assert _C.emu_pending_operations() == 0
            """,
            env={"TORCH_UVM_CONF": "emulated_schedule_seed:5"},
        )

    def test_discard_never_reaches_the_next_tensor(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch, torch_uvm
            from torch_uvm import _C
            from torch_uvm import discard
            other = torch.Stream("emu")
            held = 0
            for _ in range(12):
                x = torch_uvm.memory.ones(1 << 19)
                torch.accelerator.synchronize()
                with other:
                    discard(x)
                address, pending = x.data_ptr(), _C.emu_pending_operations()
                del x
                y = torch_uvm.memory.ones(1 << 19)
                assert y.data_ptr() != address or _C.emu_pending_operations() == 0
                held += pending > 0
                del y
            assert held > 0
            """,
            env={"TORCH_UVM_CONF": "emulated_schedule_seed:5"},
        )

    def test_stream_of_another_kind(self, spawn: Spawn) -> None:
        x = torch_uvm.memory.ones(MIB)

        class Foreign(torch.Stream):
            @property
            def device(self) -> torch.device:
                return torch.device("xpu:0")

        with pytest.raises(ValueError, match=r"xpu:0.*the accelerator, emu"):
            prefetch(x, stream=Foreign("emu"))


def test_several_devices(spawn: Spawn) -> None:
    spawn(
        """
        import torch, torch_uvm
        from torch_uvm import _C, emulated
        from torch_uvm import advise, discard, prefetch, residency
        zero, one, cpu = torch.device("emu:0"), torch.device("emu:1"), torch.device("cpu")
        x, y = torch_uvm.memory.ones(1 << 20, device=zero), torch_uvm.memory.ones(1 << 20, device=one)
        z = torch_uvm.memory.ones(1 << 20, device=cpu)
        prefetch([x, y, z], "emu:1")
        assert emulated.residency(x) == residency(x) == {one: 1 << 22}
        assert residency([x, y, z]) == {one: 3 << 22}
        prefetch([x, y, z])  # each to the device of its label
        assert [residency(t) for t in (x, y, z)] == [{zero: 1 << 22}, {one: 1 << 22}, {cpu: 1 << 22}]
        assert [emulated.residency(t) for t in (x, y, z)] == [{zero: 1 << 22}, {one: 1 << 22}, {cpu: 1 << 22}]
        assert residency([x, y, z]) == {zero: 1 << 22, one: 1 << 22, cpu: 1 << 22}
        with torch.accelerator.device_index(1):
            prefetch(z, "emu")  # the current device
        assert residency(z) == {one: 1 << 22}
        prefetch([x, y], cpu)
        assert residency([x, y]) == {cpu: 2 << 22}
        address, count, _ = _C.block_of(x)
        advise(x, preferred_location=one, accessed_by=[zero, one])
        found = _C.range_attributes(address, count)
        assert (found["preferred_location"], found["accessed_by"]) == (1, [0, 1]), found
        advise(x, accessed_by="emu:1")
        assert _C.range_attributes(address, count)["accessed_by"] == [1]
        discard([x, y])
        assert [emulated.counters(d)["discard_calls"] for d in (zero, one)] == [1, 1]
        del x, y, z
        assert _C.check_allocator() is None
        """,
        env={"TORCH_UVM_CONF": "emulated_devices:2"},
    )


def test_hints_in_a_forked_child_do_nothing(spawn: Spawn) -> None:
    spawn("""
        import os, torch, torch_uvm, traceback
        from torch_uvm import advise, prefetch, residency
        x = torch_uvm.memory.ones(1 << 20, device="cpu")
        advise(x, read_mostly=True)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                prefetch(x, "emu:0")  # with an index: in a child CUDA does not report the current device
                advise(x, False, "cpu")
                assert residency(x) == {torch.device("cpu"): 1 << 22}
                del x
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
    """)
