"""Managed tensors in calls that replace bytes: sent to other processes, shared, resized, swapped."""

# Storages have methods that torch's stubs do not declare.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from _dlpack_tensors import labels, managed
from _spawn import Spawn
from torch import nn

import torch_uvm

EMU = torch.device("emu:0")


def both() -> tuple[torch.Tensor, torch.Tensor]:
    x = managed(4)
    return x, torch_uvm.to(x, "cpu")


def sent(value: Any) -> Any:
    """The received tensor, when sending to this process."""
    return pickle.loads(ForkingPickler.dumps(value))


@pytest.fixture(params=["file_descriptor", "file_system"])
def strategy(request: pytest.FixtureRequest) -> Iterator[str]:
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy(request.param)
    yield request.param
    mp.set_sharing_strategy(before)


class TestBytesReplaced:
    """PyTorch may replace a storage's memory without notice. Other labels keep the old bytes."""

    @pytest.mark.parametrize("share", ["_share_fd_cpu_", "_share_filename_cpu_"])
    def test_by_shared_memory(self, share: str) -> None:
        x, y = both()
        getattr(torch._C.StorageBase, share)(y.untyped_storage())  # bypasses the check that refuses it
        assert not torch_uvm.is_managed(y) and labels(y) == 0
        assert labels(x) == 1
        y.fill_(9)
        z = torch_uvm.to(x, "cpu")
        assert z.data_ptr() == x.data_ptr() and z.tolist() == [0, 1, 2, 3]
        assert z.untyped_storage()._cdata != y.untyped_storage()._cdata
        del z
        assert x.resize_(1 << 16).shape == (1 << 16,), "with one label it can grow"

    def test_by_a_resize_to_nothing_and_back(self) -> None:
        x = managed(4)
        torch_uvm.to(x, "cpu")  # freed immediately: the owner has one label
        used = torch_uvm.memory.memory_allocated()
        x.untyped_storage().resize_(0)
        assert torch_uvm.memory.memory_allocated() < used
        with torch_uvm.enabled():
            x.untyped_storage().resize_(16)
        x.fill_(3)
        y = torch_uvm.to(x, "cpu")
        assert y.data_ptr() == x.data_ptr() and y.tolist() == [3] * 4 and labels(x) == 2

    @pytest.mark.parametrize(
        "replace",
        [
            lambda x: x.set_(torch.zeros(4, device="emu")),
            lambda x: setattr(x, "data", torch.zeros(4, device="emu")),
        ],
        ids=["set_", "data"],
    )
    def test_by_another_storage_under_the_tensor(self, replace: Callable[[torch.Tensor], Any]) -> None:
        x, y = both()
        replace(x)
        gc.collect()
        assert labels(y) == 1 and not torch_uvm.is_managed(x)
        z = torch_uvm.to(y, "emu")
        assert z.data_ptr() == y.data_ptr() and z.tolist() == [0, 1, 2, 3]

    def test_by_another_tensor_under_the_name(self) -> None:
        x, y = both()
        other = torch.zeros(4)
        torch.utils.swap_tensors(y, other)
        assert not torch_uvm.is_managed(y) and other.data_ptr() == x.data_ptr() and labels(other) == 2
        del other
        gc.collect()
        assert labels(x) == 1 and torch_uvm.to(x, "cpu").tolist() == [0, 1, 2, 3]

    def test_contents_copied_into_a_storage_have_all_labels(self) -> None:
        x, y = both()
        y.untyped_storage().copy_(torch.full((4,), 5.0).untyped_storage())
        assert x.tolist() == [5.0] * 4 and labels(x) == 2

    def test_no_resize_of_the_storage_under_several_labels(self) -> None:
        x, y = both()
        for storage in (x.untyped_storage(), y.untyped_storage()):
            for size in (0, 8, 1 << 20):
                with pytest.raises(RuntimeError, match="not resizable"):
                    storage.resize_(size)
        assert labels(x) == 2 and x.tolist() == y.tolist() == [0, 1, 2, 3]


class TestResize:
    @pytest.mark.parametrize("one_label", [True, False])
    @pytest.mark.parametrize(
        "grow",
        [
            lambda y: y.resize_(100),
            lambda y: y.resize_(2, 50, memory_format=torch.contiguous_format),
            lambda y: y.resize_as_(torch.empty(100)),
            lambda y: y[3:].resize_(2),
            lambda y: torch.ops.aten.resize_(y, [100]),
        ],
        ids=["resize_", "memory_format", "resize_as_", "offset", "operator"],
    )
    def test_refused_before_anything_has_changed(
        self, grow: Callable[[torch.Tensor], Any], one_label: bool
    ) -> None:
        x, y = both()
        if one_label:
            del x
            y = managed(4, device="cpu")
        before = (y.shape, y.stride(), y.data_ptr(), labels(y), torch_uvm.memory.memory_allocated())
        with pytest.raises(RuntimeError, match="bytes of managed memory of which 16 are there"):
            grow(y)
        assert (y.shape, y.stride(), y.data_ptr(), labels(y), torch_uvm.memory.memory_allocated()) == before
        assert y.tolist() == [0, 1, 2, 3]

    def test_to_as_many_bytes_or_fewer(self) -> None:
        x, y = both()
        assert y.resize_(2, 2).tolist() == [[0, 1], [2, 3]]
        assert y.resize_(1).tolist() == [0] and x.shape == (4,)

    def test_out_of_an_operator_does_not_overrun_the_bytes(self) -> None:
        x, y = both()
        out = y[:]  # PyTorch sets an output's sizes before its storage refuses, as with numpy's memory
        with pytest.warns(UserWarning, match="resized"), pytest.raises(RuntimeError, match="not resizable"):
            torch.add(torch.ones(100), 1, out=out)
        assert x.tolist() == y.tolist() == [0, 1, 2, 3]

    def test_ordinary_tensors_resize(self) -> None:
        x = torch.arange(4)
        assert x.resize_(2, 4).shape == (2, 4) and x[0].tolist() == [0, 1, 2, 3]
        assert torch.empty(0).resize_(2, 3, 4, 4, memory_format=torch.channels_last).stride(1) == 1
        with pytest.raises(RuntimeError):
            x.resize_(-1)

    def test_no_warning_at_import(self, spawn: Spawn) -> None:
        code = "import torch_uvm, torch; torch.ones(2).resize_(50)"
        done = spawn(args=["-W", "error", "-c", code], env={"TORCH_UVM_DEVICE": "emu"})
        assert done.stderr == ""


class TestShareMemory:
    def test_one_label_becomes_ordinary_shared_memory(self, strategy: str) -> None:
        x = managed(4, device="cpu")
        used = torch_uvm.memory.memory_allocated()
        assert x.share_memory_() is x
        assert x.is_shared() and not torch_uvm.is_managed(x) and x.tolist() == [0, 1, 2, 3]
        assert torch_uvm.memory.memory_allocated() < used

    @pytest.mark.parametrize(
        "share",
        [
            lambda y: y.share_memory_(),
            lambda y: y[1:].share_memory_(),
            lambda y: y.untyped_storage().share_memory_(),
            lambda y: y.untyped_storage()._share_fd_cpu_(),
            lambda y: y.untyped_storage()._share_filename_cpu_(),
            lambda y: nn.ParameterList([nn.Parameter(y)]).share_memory(),
        ],
        ids=["tensor", "view", "storage", "descriptor", "file name", "module"],
    )
    def test_several_labels_raise_and_nothing_changes(
        self, share: Callable[[torch.Tensor], Any], strategy: str
    ) -> None:
        x, y = both()
        used = torch_uvm.memory.memory_allocated()
        with pytest.raises(RuntimeError, match=r"2 labels .* managed=False\)\.share_memory_\(\)"):
            share(y)
        assert labels(x) == 2 and y.data_ptr() == x.data_ptr() and not y.is_shared()
        assert torch_uvm.memory.memory_allocated() == used and x.tolist() == [0, 1, 2, 3]
        shared = y.to("cpu", managed=False).share_memory_()  # type: ignore[call-overload]
        assert shared.is_shared() and shared.tolist() == [0, 1, 2, 3], "the message's remedy fails"

    def test_device_tensors_are_unchanged_as_with_cuda(self) -> None:
        x = managed(4)
        assert x.share_memory_() is x and torch_uvm.is_managed(x)


class TestSending:
    @pytest.mark.parametrize("device", ["cpu", "emu"])
    def test_is_a_copy_and_leaves_the_sender_as_it_is(self, device: str, strategy: str) -> None:
        x, y = both()
        source = x if device == "emu" else y
        used = torch_uvm.memory.memory_allocated()
        arrived = sent(source)
        assert arrived.device == source.device and arrived.tolist() == [0, 1, 2, 3]
        assert not torch_uvm.is_managed(arrived)
        assert arrived.is_shared() or device != "cpu"  # before torch 2.13 False for `emu`
        arrived.zero_()
        assert x.tolist() == [0, 1, 2, 3]
        assert labels(x) == 2 and torch_uvm.is_managed(source) and y.data_ptr() == x.data_ptr()
        assert torch_uvm.memory.memory_allocated() == used

    @pytest.mark.parametrize("device", ["cpu", "emu"])
    def test_views_of_a_message_share_their_copy(self, device: str, strategy: str) -> None:
        x = managed(3, 4, device=device)
        whole, part, turned = sent([x, x[1:, 1:], x.t()])
        whole.add_(10)
        assert part.tolist() == [[15, 16, 17], [19, 20, 21]]
        assert turned.stride() == (1, 4) and torch.equal(turned, whole.t())

    def test_two_labels_become_two_copies(self) -> None:
        here, there = sent(both())
        here.zero_()
        assert there.tolist() == [0, 1, 2, 3]

    def test_the_receiver_chooses_the_memory_on_a_device(self) -> None:
        with torch_uvm.enabled():
            assert torch_uvm.is_managed(sent(managed(4)))
        assert not torch_uvm.is_managed(sent(managed(4)))

    def test_plain_memory_on_a_device_has_no_handle_either(self) -> None:
        assert sent(torch.ones(2, device="emu")).device == EMU

    @pytest.mark.parametrize("device", ["cpu", "emu"])
    def test_parameters_gradients_and_empty_tensors(self, device: str, strategy: str) -> None:
        p = sent(nn.Parameter(managed(4, device=device)))
        assert isinstance(p, nn.Parameter) and p.requires_grad and p.tolist() == [0, 1, 2, 3]
        assert sent(managed(4, device=device).requires_grad_()).requires_grad
        assert (sent(managed(0, 3, device=device)).shape, sent(managed(0, device=device)).device.type) == (
            (0, 3),
            device,
        )
        with pytest.raises(RuntimeError, match="non-leaf"):
            sent(managed(4, device=device).requires_grad_() * 1)

    def test_ordinary_tensors_are_shared(self, strategy: str) -> None:
        x = torch.ones(4)
        arrived = sent(x)
        arrived.zero_()
        assert x.is_shared() and x.tolist() == [0] * 4

    def test_a_subclass_with_a_pickler_of_its_own(self) -> None:
        class Labelled(torch.Tensor):
            pass

        x = managed(4, device="cpu")
        assert copy.copy(sent(x.as_subclass(Labelled).untyped_storage())).tolist() == list(
            x.numpy().tobytes()
        )


CHILD = """
    import torch, torch_uvm
    import torch.multiprocessing as mp

    def child(inbox, outbox, argument):
        if argument is not None:
            outbox.put((argument.device.type, argument.tolist()))
        while (got := receive(inbox)) != "end":
            outbox.put(got if isinstance(got, str) else [(t.device.type, t.tolist()) for t in got])

    def receive(inbox):
        try:
            return inbox.get()
        except RuntimeError as error:
            return str(error)

    if __name__ == "__main__":
        context = mp.get_context(METHOD)
        inbox, outbox = context.Queue(), context.Queue()
        x = torch_uvm.memory.ones(4)
        y = torch_uvm.to(x, "cpu")
        # Nothing is sent to a forked child: it inherits the tensor.
        argument = y if METHOD != "fork" else None
        # A daemon, so that a failed check below does not wait for it.
        process = context.Process(target=child, args=(inbox, outbox, argument), daemon=True)
        process.start()
        if argument is not None:
            assert outbox.get(timeout=120) == ("cpu", [1] * 4)
        inbox.put([y, y[2:]])
        assert outbox.get(timeout=120) == [("cpu", [1] * 4), ("cpu", [1] * 2)]
        inbox.put([x])
        answer = outbox.get(timeout=120)
        if METHOD == "fork":
            assert "forked" in answer and "spawn" in answer, answer
        else:
            assert answer == [("emu", [1] * 4)], answer
        y.add_(1)
        assert x.tolist() == [2] * 4 and torch_uvm.is_managed(y)
        inbox.put("end")
        process.join(120)
        assert process.exitcode == 0
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_queues_to_children(method: str, spawn: Spawn) -> None:
    script = spawn.folder / "script.py"
    lines = CHILD.replace("METHOD", repr(method)).splitlines()
    script.write_text("\n".join(line[4:] for line in lines))
    spawn(args=[str(script)])
