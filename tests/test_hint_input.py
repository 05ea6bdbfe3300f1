"""Bad input of the hints: each call is refused by name and changes nothing."""

# torch has no stub for torch.emu; wrong arguments are the point of some tests.
# mypy: disable-error-code="arg-type, attr-defined, call-arg, misc, override"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import torch_uvm
from torch_uvm import _C, advise, discard, emulated, prefetch, residency

EMU = torch.device("emu:0")
CPU = torch.device("cpu")
MIB = 2**20


class Bad(NamedTuple):
    call: Callable[[torch.Tensor], Any]
    error: type[Exception]
    words: tuple[str, ...]


class Stranger:
    """A class that is neither a tensor nor a container of tensors."""

    def __repr__(self) -> str:
        return "stranger"


PLAIN = torch.zeros(3)
CASES = {
    "prefetch an int": Bad(lambda x: prefetch(3), TypeError, ("prefetch(): x is 3 (int)", "nested lists")),
    "prefetch None": Bad(lambda x: prefetch(None), TypeError, ("x is None (NoneType)",)),
    "prefetch a string": Bad(lambda x: prefetch("x"), TypeError, ("x is 'x' (str)",)),
    "prefetch a set": Bad(lambda x: prefetch({1}), TypeError, ("x is {1} (set)",)),
    "prefetch a generator": Bad(lambda x: prefetch(t for t in [x]), TypeError, ("(generator)", "lists")),
    "prefetch a class": Bad(lambda x: prefetch(nn.Linear), TypeError, ("x is <class", "(type)")),
    "prefetch a storage": Bad(
        lambda x: prefetch(torch.zeros(1).untyped_storage()), TypeError, ("(UntypedStorage)",)
    ),
    "prefetch nested": Bad(lambda x: prefetch([x, {"a": 3}]), TypeError, ("x[1]['a'] is 3 (int)",)),
    "prefetch None inside": Bad(lambda x: prefetch((x, None)), TypeError, ("x[1] is None (NoneType)",)),
    "prefetch deep": Bad(
        lambda x: prefetch({"p": [[x], ({2: Stranger()},)]}), TypeError, ("x['p'][1][0][2] is stranger",)
    ),
    "prefetch not managed": Bad(
        lambda x: prefetch(PLAIN), ValueError, ("prefetch()", "cpu", "torch_uvm.to(x, device, managed=True)")
    ),
    "prefetch plain device memory": Bad(
        lambda x: prefetch(torch.zeros(3, device="emu")), ValueError, ("emu:0", "managed=True")
    ),
    "prefetch a meta tensor": Bad(
        lambda x: prefetch(torch.zeros(3, device="meta")), ValueError, ("on meta", "not managed")
    ),
    "prefetch a sparse tensor": Bad(
        lambda x: prefetch(torch.eye(3).to_sparse()), ValueError, ("layout torch.sparse_coo", "not managed")
    ),
    "prefetch a nested tensor": Bad(
        lambda x: prefetch(torch.nested.nested_tensor([torch.ones(2)])), ValueError, ("not managed",)
    ),
    "residency of a nested tensor": Bad(
        lambda x: residency(torch.nested.nested_tensor([torch.ones(2)])), ValueError, ("memory of their own",)
    ),
    "prefetch to an unknown device": Bad(lambda x: prefetch(x, "gpu"), ValueError, ("'gpu' (str)", "emu")),
    "prefetch to another backend": Bad(lambda x: prefetch(x, "xla"), ValueError, ("'xla'", "'cpu', 'emu'")),
    "prefetch to meta": Bad(lambda x: prefetch(x, "meta"), ValueError, ("'meta'", "'cpu', 'emu'")),
    "prefetch to index 9": Bad(lambda x: prefetch(x, 9), ValueError, ("device is 9 (int)",)),
    "prefetch to index -1": Bad(lambda x: prefetch(x, -1), ValueError, ("device is -1 (int)",)),
    "prefetch to True": Bad(lambda x: prefetch(x, True), TypeError, ("device is True (bool)",)),
    "prefetch to a tensor": Bad(lambda x: prefetch(x, x[:0]), TypeError, ("device is tensor",)),
    "prefetch with a wrong stream": Bad(
        lambda x: prefetch(x, stream=0), TypeError, ("stream is 0 (int)", "a torch.Stream, or None")
    ),
    "prefetch with a wrong keyword": Bad(
        lambda x: prefetch(x, non_blocking=True), TypeError, ("'non_blocking'", "x, device, stream")
    ),
    "advise about an int": Bad(lambda x: advise([x, 3], True), TypeError, ("advise(): x[1] is 3 (int)",)),
    "advise not managed": Bad(lambda x: advise(PLAIN, True), ValueError, ("advise()", "not managed")),
    "advise read_mostly": Bad(
        lambda x: advise(x, read_mostly=1), TypeError, ("read_mostly is 1 (int)", "True, False, None")
    ),
    "advise preferred_location": Bad(
        lambda x: advise(x, True, "gpu"), ValueError, ("preferred_location is 'gpu'", "'cpu'")
    ),
    "advise preferred_location type": Bad(
        lambda x: advise(x, True, ["cpu"]), TypeError, ("preferred_location is ['cpu'] (list)",)
    ),
    "advise accessed_by": Bad(
        lambda x: advise(x, True, 0, accessed_by=["cpu", 7]), ValueError, ("accessed_by[1] is 7 (int)",)
    ),
    "advise accessed_by type": Bad(
        lambda x: advise(x, True, 0, accessed_by=1.5), TypeError, ("accessed_by is 1.5 (float)",)
    ),
    "advise with a wrong keyword": Bad(
        lambda x: advise(x, preferred="cpu"), TypeError, ("'preferred'", "preferred_location")
    ),
    "discard a string inside": Bad(
        lambda x: discard({"a": x, "b": "s"}), TypeError, ("discard(): x['b'] is 's' (str)",)
    ),
    "discard not managed": Bad(lambda x: discard(PLAIN), ValueError, ("discard()", "not managed")),
    "discard a leaf": Bad(
        lambda x: discard([x, nn.Parameter(x)]), RuntimeError, ("leaf Variable that requires grad",)
    ),
    "residency of an int": Bad(lambda x: residency([x, 3]), TypeError, ("residency(): x[1] is 3 (int)",)),
    "residency of a meta tensor": Bad(
        lambda x: residency(x.to("meta")), ValueError, ("on meta", "memory of their own")
    ),
    "residency of a sparse tensor": Bad(
        lambda x: residency(torch.eye(3).to_sparse()), ValueError, ("torch.sparse_coo", "strided")
    ),
    "operator with half a stream": Bad(
        lambda x: torch.ops.torch_uvm.prefetch([x], EMU, stream=[0]), ValueError, ("a stream of 1 numbers",)
    ),
    "operator with a stream of the CPU": Bad(
        lambda x: torch.ops.torch_uvm.prefetch([x], None, stream=[0, 0, 0]),
        ValueError,
        ("the device type 0", "the accelerator's, emu"),
    ),
    "operator with a stream of no device type": Bad(
        lambda x: torch.ops.torch_uvm.prefetch([x], None, stream=[0, 0, 276]), ValueError, ("type 276",)
    ),
    "operator with a stream of another device": Bad(
        lambda x: torch.ops.torch_uvm.prefetch([x], None, stream=[0, 256, torch.Stream(EMU).device_type]),
        ValueError,
        ("emu:256", "0 to 0"),
    ),
    "operator with an unknown device": Bad(
        lambda x: torch.ops.torch_uvm.prefetch([x], torch.device("emu:9")),
        ValueError,
        ("emu:9", "emu:0 to emu:0"),
    ),
    "operator with two places": Bad(
        lambda x: torch.ops.torch_uvm.advise([x], preferred_location=[0, -1]), ValueError, ("2 preferred",)
    ),
    "operator with an unknown place": Bad(
        lambda x: torch.ops.torch_uvm.advise([x], read_mostly=True, accessed_by=[-1, 5]), ValueError, ("5",)
    ),
    "operator with an impossible place": Bad(
        lambda x: torch.ops.torch_uvm.advise([x], accessed_by=[-2]),
        ValueError,
        ("location -2", "-1 for the CPU"),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_input_is_refused_by_name_and_changes_nothing(case: Bad) -> None:
    x = torch_uvm.memory.ones(MIB, device="cpu")

    def state() -> tuple[Any, ...]:
        counters = emulated.counters()
        made = [counters[f"{name}_calls"] for name in ("prefetch", "advise", "discard")]
        block = _C.block_of(x)
        assert block is not None
        attributes = _C.range_attributes(block[0], block[1])
        return made, block, attributes, residency(x), emulated.residency(x), x._version, x.requires_grad

    before = state()
    with pytest.raises(case.error) as refused:
        case.call(x)
    for words in case.words:
        assert words in str(refused.value)
    assert state() == before
