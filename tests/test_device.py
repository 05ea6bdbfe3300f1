"""The emulated accelerator as a PyTorch device: its functions, its indices, what may not be mixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _spawn import Spawn

import torch_uvm
from torch_uvm import _C, emulated

emu: Any = torch.get_device_module("emu")
MIB = 1024**2
TWO_DEVICES = {"TORCH_UVM_CONF": "emulated_devices:2,emulated_memory:64MiB"}


def _counted(call: Callable[[], Any]) -> dict[str, int]:
    """What `call` adds to the counters; only what is not 0."""
    before = emulated.counters()
    call()
    after = emulated.counters()
    return {key: after[key] - before[key] for key in after if after[key] != before[key]}


class TestAccelerator:
    def test_is_current(self) -> None:
        assert torch.accelerator.is_available()
        assert torch.accelerator.current_accelerator() == torch.device("emu")
        assert torch.accelerator.device_count() == 1
        assert torch.accelerator.current_device_index() == 0
        assert torch._C._get_privateuse1_backend_name() == "emu"

    def test_current_stream_is_of_the_device(self) -> None:
        stream = torch.accelerator.current_stream()
        assert stream.device == torch.device("emu", 0)
        assert stream == torch.accelerator.current_stream("emu:0")

    def test_synchronize_waits_and_is_counted(self) -> None:
        host = torch.ones(MIB).pin_memory()
        there = torch.zeros(MIB, device="emu")
        there.copy_(host, non_blocking=True)
        assert _counted(torch.accelerator.synchronize) == {"synchronisations": 1}
        assert _C.emu_pending_operations() == 0

    def test_memory_functions_see_the_device(self) -> None:
        before = torch.accelerator.memory_allocated()
        x = torch.empty(3 * MIB, dtype=torch.uint8, device="emu")
        assert torch.accelerator.memory_allocated() - before == 3 * MIB
        assert torch.accelerator.memory_reserved() >= torch.accelerator.memory_allocated()
        del x
        assert torch.accelerator.memory_allocated() == before

    def test_memory_info_is_free_and_total(self) -> None:
        free, total = torch.accelerator.get_memory_info()
        assert total == 256 * MIB and 0 < free <= total
        assert torch.accelerator.get_memory_info() == emu.mem_get_info()

    def test_several_devices(self, spawn: Spawn) -> None:
        """Current devices, contexts, streams and memory by device; a device per thread."""
        spawn(
            """
            import threading, torch, torch_uvm
            emu = torch.get_device_module("emu")
            acc = torch.accelerator
            assert acc.device_count() == emu.device_count() == 2
            acc.set_device_index(1)
            assert acc.current_device_index() == emu.current_device() == 1
            assert torch.empty(1, device="emu").device == torch.device("emu:1")
            assert acc.current_stream().device == torch.device("emu:1")
            seen = []
            thread = threading.Thread(target=lambda: seen.append(acc.current_device_index()))
            thread.start(); thread.join()
            assert seen == [0], "a thread begins on device 0"
            with acc.device_index(0):
                assert torch.ones(1, device="emu").device.index == 0
                with emu.device("emu:1"):
                    assert torch.ones(1, device="emu").device.index == 1
                with emu.device_of(torch.ones(1, device="emu:1")):
                    assert emu.current_device() == 1
                with emu.device(None), emu.device_of(torch.ones(1)):
                    assert emu.current_device() == 0
                assert emu.current_device() == 0
            assert emu.current_device() == 1
            try:
                with emu.device(0):
                    raise KeyError
            except KeyError:
                assert emu.current_device() == 1
            emu.set_device("emu:0")
            x = torch.ones(1 << 20, dtype=torch.uint8, device="emu:1")
            assert emu.memory_allocated(1) == 1 << 20 and emu.memory_allocated(0) == 0
            assert (x + x).device == (x.clone()).device == torch.zeros_like(x).device == x.device
            assert x.get_device() == 1 and emu.current_device() == 0
            acc.synchronize(1)
            try:
                torch.empty(1, device="emu:2")
            except ValueError as error:
                assert "index 2" in str(error) and "there are 2 (0 to 1)" in str(error), error
            else:
                raise AssertionError("emu:2 was taken")
            """,
            env=TWO_DEVICES,
        )


class TestModule:
    def test_is_there_and_available(self) -> None:
        assert emu.is_available()
        assert emu.device_count() == 1 and emu.current_device() == 0
        torch.empty(1, device="emu")
        assert emu.is_initialized()

    def test_device_is_a_context(self) -> None:
        with emu.device("emu:0"), emu.device(0), emu.device(torch.device("emu")):
            assert emu.current_device() == 0

    def test_takes_no_other_devices(self) -> None:
        with pytest.raises(ValueError, match="device cpu; expected one of type 'emu'"):
            emu.memory_allocated("cpu")

    def test_properties(self) -> None:
        properties = emu.get_device_properties(0)
        assert properties["total_memory"] == 256 * MIB
        assert emu.get_device_name() == properties["name"] != ""
        assert emu.is_bf16_supported() and torch.float16 in emu.get_amp_supported_dtype()

    def test_all_names_exist(self) -> None:
        assert [name for name in emu.__all__ if not hasattr(emu, name)] == []


class TestLegacyTypes:
    def test_of_tensors(self) -> None:
        x = torch.ones(3, device="emu")
        assert x.type() == "torch.emu.FloatTensor"
        assert isinstance(x, emu.FloatTensor) and not isinstance(x, emu.DoubleTensor)
        assert not isinstance(torch.ones(3), emu.FloatTensor) and not isinstance(3, emu.FloatTensor)
        for kind in (emu.LongTensor, "torch.emu.LongTensor"):
            y = x.type(kind)
            assert y.dtype is torch.int64 and y.device == x.device and y.tolist() == [1, 1, 1]
        assert torch.ones(2).type(emu.HalfTensor).type() == "torch.emu.HalfTensor"

    def test_make_tensors(self) -> None:
        assert emu.FloatTensor(2, 3).shape == (2, 3)
        assert emu.FloatTensor(torch.Size([4])).shape == (4,)
        assert emu.FloatTensor().shape == (0,)
        made = emu.BFloat16Tensor([1, 2])
        assert made.dtype is torch.bfloat16 and made.tolist() == [1, 2]
        assert made.device == torch.device("emu", 0)
        assert emu.IntTensor([1], device="emu:0").type() == "torch.emu.IntTensor"
        same = emu.BFloat16Tensor(made)
        assert same.data_ptr() == made.data_ptr() and same is not made

    def test_bad_input(self) -> None:
        with pytest.raises(TypeError, match=r"expected torch.emu.FloatTensor \(got torch.emu.LongTensor\)"):
            emu.FloatTensor(torch.ones(2, dtype=torch.int64, device="emu"))
        with pytest.raises(RuntimeError, match="expects device type: emu but device type: cpu"):
            emu.FloatTensor(2, device="cpu")


class TestUnknownIndex:
    @pytest.mark.parametrize(
        "call",
        [
            lambda: torch.empty(1, device="emu:7"),
            lambda: torch.ones(1).to("emu:7"),
            lambda: torch.ones(1, device="emu").to("emu:7"),
            lambda: torch.empty_strided((1,), (1,), device="emu:7"),
            lambda: torch.rand(1, device="emu:7"),
            lambda: torch.tensor([1], device="emu:7"),
            lambda: torch.accelerator.set_device_index(7),
            lambda: torch.accelerator.synchronize(7),
            lambda: torch.accelerator.memory_stats(7),
            lambda: torch.accelerator.current_stream(7),
            lambda: torch.Stream("emu:7"),
            lambda: torch.Generator("emu:7"),
            lambda: emu.device(7),
            lambda: emu.Stream(7),
            lambda: emu.memory_allocated("emu:7"),
            lambda: emu.manual_seed(1) or emu.get_rng_state(7),
        ],
    )
    def test_names_index_and_count(self, call: Callable[[], Any]) -> None:
        with pytest.raises(ValueError, match=r"emu device index 7; there are 1 \(0 to 0\)"):
            call()
        assert torch.accelerator.current_device_index() == 0

    def test_negative(self) -> None:
        with pytest.raises(RuntimeError, match="must not be negative"):
            torch.empty(1, device=torch.device("emu", -2))


class TestMixedDevices:
    SAME = "Expected all tensors to be on the same device, but found at least two devices, emu:0 and cpu"

    @pytest.mark.parametrize(
        "call",
        [
            lambda here, there: there + here,
            lambda here, there: here + there,
            lambda here, there: here.add_(there),
            lambda here, there: there.add_(here),
            lambda here, there: here @ there,
            lambda here, there: torch.nn.functional.linear(there, here),
            lambda here, there: torch.addmm(there, here, there),
            lambda here, there: torch.where(here > 0, there, there),
            lambda here, there: there.gather(0, here.long()),
            lambda here, there: there.index_select(0, here[0].long()),
            lambda here, there: torch.nn.functional.embedding(here.long(), there),
            lambda here, there: torch.nn.functional.mse_loss(there, here),
            lambda here, there: torch.cat([there, here]),
            lambda here, there: torch.cat([here, there]),
            lambda here, there: torch.stack([here, there]),
            lambda here, there: torch.stack([there[0, 0], here[0, 0]]),
            lambda here, there: torch._foreach_add([there], [here]),
            lambda here, there: torch.add(there, there, out=here),
            lambda here, there: torch.add(here, here, out=there),
            lambda here, there: torch.mm(here, here, out=there),
            lambda here, there: torch.cat([there, there], out=torch.empty(0)),
            lambda here, there: there.index_select(0, torch.tensor(0)),  # where to read is no number
            lambda here, there: there.take(torch.tensor(0)),
            lambda here, there: here + there[0, 0],  # a number may come to the device, not from it
            lambda here, there: here[there.long()],
            lambda here, there: there.index_put_((torch.tensor([0]),), here[0]),
            lambda here, there: torch.sum(there, 0, out=torch.empty(())),  # written, so no number
        ],
    )
    def test_raise(self, call: Callable[[Any, Any], Any]) -> None:
        here, there = torch.ones(2, 2), torch.ones(2, 2, device="emu")
        with pytest.raises(RuntimeError, match=self.SAME):
            call(here, there)
        assert here.eq(1).all() and here.shape == (2, 2)
        assert there.eq(1).all() and there.shape == (2, 2)

    def test_numbers_of_the_cpu_are_accepted(self) -> None:
        x = torch.tensor([1.0, 2.0], device="emu")
        for result in (x * torch.tensor(3.0), torch.tensor(3.0) * x, torch.tensor(3.0, device="emu") * x):
            assert result.is_cuda is False and result.device.type == "emu"
            assert result.tolist() == [3, 6]
        assert torch.where(x > 1, x, torch.tensor(0.0)).tolist() == [0, 2]
        assert x.clone().fill_(torch.tensor(7.0)).tolist() == [7, 7]
        assert x.clone().masked_fill_(x > 1, torch.tensor(-1.0)).tolist() == [1, -1]

    def test_indices_of_the_cpu_are_accepted(self) -> None:
        x = torch.arange(6.0, device="emu").view(3, 2)
        assert x[torch.tensor([2, 0])].tolist() == [[4, 5], [0, 1]]
        assert x[torch.tensor([True, False, True])].tolist() == [[0, 1], [4, 5]]
        x[torch.tensor([1])] = 9
        x[torch.tensor([0]), torch.tensor([1])] = torch.tensor(8.0)
        assert x.tolist() == [[0, 8], [9, 9], [4, 5]]

    def test_two_emulated_devices(self, spawn: Spawn) -> None:
        """Operators refuse them, numbers included, and copies take them, whatever device is current."""
        spawn(
            """
            import torch, torch_uvm
            a, b = torch.arange(6.0, device="emu:0").view(2, 3), torch.ones(2, 3, device="emu:1")
            calls = [
                lambda: a + b, lambda: b + a, lambda: a.add_(b), lambda: torch.cat([a, b]),
                lambda: torch.stack([b, a]), lambda: torch.add(a, a, out=b), lambda: a @ b.t(),
                lambda: a[b.long()], lambda: b[a[0].long()], lambda: torch._foreach_mul([a], [b]),
                lambda: a * b[0, 0], lambda: a.fill_(b[0, 0]),
            ]
            for number, call in enumerate(calls):
                try:
                    call()
                except RuntimeError as error:
                    assert "same device" in str(error), (number, error)
                    assert "emu:0" in str(error) and "emu:1" in str(error), (number, error)
                else:
                    raise AssertionError(f"call {number} mixed two devices")
            assert a.flatten().tolist() == list(range(6)) and b.eq(1).all()

            for current in (0, 1):
                torch.accelerator.set_device_index(current)
                moved = a.to("emu:1")
                assert moved.device == b.device and moved.tolist() == a.tolist()
                assert moved.data_ptr() != a.data_ptr()
                assert moved.to("emu:0").tolist() == a.tolist()
                assert a.t().to("emu:1").stride() == a.t().stride(), "the format is preserved"
                assert a[:, ::2].to("emu:1").tolist() == a[:, ::2].tolist()
                assert a.to("emu:1", torch.int64).tolist() == a.tolist()
                other = torch.zeros(3, 2, dtype=torch.float64, device="emu:1")
                assert other.t().copy_(a[0]).tolist() == [[0, 1, 2], [0, 1, 2]]
                grown = torch.zeros(2, device="emu:1").resize_(1000)
                assert grown.device.index == 1 and grown[:2].eq(0).all()
                assert torch.empty(0, device="emu:1").set_().device.index == 1
                assert (b + 1).data_ptr() and (b + 1).device.index == 1
            x = a.clone().requires_grad_()
            (x.to("emu:1") * 2).sum().backward()
            assert x.grad.device == x.device and x.grad.eq(2).all()
            """,
            env=TWO_DEVICES,
        )


class TestUnsupported:
    @pytest.mark.parametrize(
        "call",
        [
            lambda x: x.to_sparse_csr(),
            lambda x: torch.eye(2).to_sparse_csr().to("emu").to_dense(),
            lambda x: torch.empty(2, 2, layout=torch.sparse_csr, device="emu"),
            lambda x: torch.eye(2).to_sparse_csr().to("emu") @ x,
            lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
            lambda x: torch.quantize_per_tensor(x.cpu(), 0.1, 0, torch.qint8).to("emu"),
        ],
    )
    @pytest.mark.filterwarnings("ignore")
    def test_raises_not_implemented(self, call: Callable[[torch.Tensor], Any]) -> None:
        with pytest.raises(NotImplementedError) as raised:
            call(torch.eye(2, device="emu"))
        assert len(str(raised.value).partition("\nException raised from")[0]) < 300


class TestKernels:
    def test_work_on_the_device_and_copy_nothing(self) -> None:
        a, b = torch.rand(256, 256, device="emu"), torch.rand(256, 256, device="emu")
        counted = _counted(lambda: a @ b)
        assert counted["kernels"] == 1
        assert not {"copy_calls", "bytes_copied_to_device", "bytes_copied_to_host"} & set(counted)

    @pytest.mark.parametrize(
        "view",
        [
            lambda x: x.view(-1),
            lambda x: x.t(),
            lambda x: x[1:, ::2],
            lambda x: x.expand(3, 4, 4),
            lambda x: x.unsqueeze(0).squeeze(0),
            lambda x: x.as_strided((2,), (5,)),
            lambda x: x.diagonal(),
            lambda x: x.chunk(2)[1],
            lambda x: x.detach(),
            lambda x: x.view(torch.int32),
        ],
    )
    def test_views_are_none_and_share_the_storage(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x, here = torch.zeros(4, 4, device="emu"), torch.zeros(4, 4)
        seen: list[torch.Tensor] = []
        assert _counted(lambda: seen.append(view(x))) == {}
        expected = view(here)
        assert seen[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert seen[0].data_ptr() - x.data_ptr() == expected.data_ptr() - here.data_ptr()
        assert (seen[0].shape, seen[0].stride()) == (expected.shape, expected.stride())

    def test_first_touch_faults_each_page_once(self) -> None:
        try:
            _C.set_option("populate", "false")
            torch_uvm.empty_cache()
            with torch_uvm.enabled():
                x = torch.empty(4 * MIB, dtype=torch.uint8, device="emu")
        finally:
            _C.set_option("populate", "true")
        assert emulated.residency(x) == {}
        assert _counted(lambda: x.fill_(1))["faults_on_device"] == 64
        assert emulated.residency(x) == {torch.device("emu", 0): 4 * MIB}
        assert "faults_on_device" not in _counted(lambda: x.fill_(2)), "resident by now"

    def test_operands_are_brought_to_the_device(self) -> None:
        torch_uvm.set_budget(None)  # by faults, as the driver does
        with torch_uvm.enabled():
            big = [torch.ones(32 * MIB, device="emu") for _ in range(3)]  # 384 MiB on 256
        counted = _counted(lambda: big[0].sum())
        assert counted["kernels"] == 1
        assert counted["bytes_to_device"] > 0 and counted["faults_on_device"] > 0
        assert counted["evicted_pages"] > 0
        assert emulated.residency(big[0]) == {torch.device("emu", 0): 128 * MIB}

    def test_only_what_a_view_reaches_is_touched(self) -> None:
        torch_uvm.set_budget(None)  # pages, as the driver has them
        with torch_uvm.enabled():
            x = torch.ones(32 * MIB, device="emu")
            others = [torch.ones(32 * MIB, device="emu") for _ in range(2)]
        assert torch.device("emu", 0) not in emulated.residency(x), "evicted by the others"
        assert _counted(lambda: x[: 16 * 1024].add_(1))["faults_on_device"] == 1
        assert emulated.residency(x)[torch.device("emu", 0)] == 64 * 1024
        del others

    def test_a_kernel_takes_modelled_time(self) -> None:
        x = torch.ones(MIB, device="emu")
        before = emulated.time_us()
        for _ in range(10):
            x.add_(1)
        assert emulated.time_us() > before


class TestExit:
    def test_waits_for_the_threads_of_backward(self, spawn: Spawn) -> None:
        """They let go of a pass, and of its Python context, after backward() returns; as the interpreter
        ends that would abort the process. The long switch interval keeps them from the GIL until then."""
        spawn(
            """
            import atexit, contextvars, gc, os, sys

            def contexts():
                return sum(type(o) is contextvars.Context for o in gc.get_objects())

            @atexit.register  # before torch_uvm's own, so called after it
            def check():
                if contexts() != before:
                    os._exit(9)

            import torch, torch_uvm
            contextvars.copy_context()  # the thread's own is made
            before = contexts()
            sys.setswitchinterval(100)
            x = torch.ones(3, device="emu", requires_grad=True)
            for _ in range(30):
                x.square().sum().backward()
                torch_uvm._C.emu_finish_backward_threads()
                assert contexts() == before
            x.square().sum().backward()
            """
        )
