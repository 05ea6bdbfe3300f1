"""Every operator of PyTorch's tables, dry and in a real run on `emu`: shapes, dtypes, bytes of results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_dry_operators import CARD
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map_only

import torch_uvm
from torch_uvm._dry import meta_kernels, mode, values
from torch_uvm._dry.mode import DryMode

pytestmark = pytest.mark.skipif(not torch_uvm._C.emu_is_registered(), reason="needs the emulated accelerator")

_SAMPLES = 8  # of each operator
_SMALL = 8  # bytes with values: a scalar's. All other tensors of the samples are large for a dry run

#: What differs, and why.
VALUES = "its size follows from values"
NO_META = "it has no meta kernel; the error says so"
DIFFERENT = {
    "argwhere": VALUES,
    "bincount": VALUES,
    "combinations": VALUES,
    "masked_select": VALUES,
    "nn.functional.one_hot": VALUES,
    "nonzero": VALUES,
    "geqrf": NO_META,
    "histogram": NO_META,
    "histogramdd": NO_META,
    "linalg.lstsq": NO_META,
    "linalg.lstsq.grad_oriented": NO_META,
    "to_sparse": NO_META,
    "native_batch_norm": "the saved statistics of an evaluation, which the CPU leaves out",
    "_native_batch_norm_legit": "the same",
}


def samples_of(info: OpInfo) -> Iterator[SampleInput]:
    """On the CPU, of the first of some dtypes that the operator has."""
    wanted = (torch.float32, torch.int64, torch.bool, torch.complex64)
    dtype = next((it for it in wanted if it in info.supported_dtypes("cpu")), None)
    if dtype is not None:
        yield from itertools.islice(info.sample_inputs("cpu", dtype), _SAMPLES)


def operands_of(sample: SampleInput) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of a sample's arguments on `emu`."""

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().to("emu") if tensor.layout == torch.strided else tensor

    moved = tree_map_only(Tensor, copied, (sample.input, *sample.args))
    options = tree_map_only(Tensor, copied, dict(sample.kwargs))
    return moved, options | ({"device": "emu"} if "device" in options else {})


def described(result: Any) -> object:
    """Shapes and dtypes of tensors, and how many bytes of memory they have together."""
    found: list[object] = []
    memory: dict[int, int] = {}
    for it in tree_leaves(result):
        if isinstance(it, Tensor) and it.layout == torch.strided:
            storage = it.untyped_storage()
            memory[storage.data_ptr()] = storage.nbytes()
            found.append((it.shape, it.dtype, it.device))
        else:
            found.append(type(it))
    return found, sum(memory.values())


def name_of(info: OpInfo) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


@pytest.mark.filterwarnings("ignore")
def test_results_are_those_of_a_real_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((values, "SMALL"), (values, "SMALL_INTEGERS"), (mode, "SMALL")):
        monkeypatch.setattr(module, name, _SMALL)
    meta_kernels.register()
    torch.manual_seed(0)
    compared: set[str] = set()
    different: dict[str, object] = {}
    for info in op_db:
        try:
            samples = list(samples_of(info))
        except (RuntimeError, TypeError, AttributeError):  # of other devices
            continue
        for sample in samples:
            moved, options = operands_of(sample)
            try:
                real = described(info.op(*moved, **options))
            except Exception:  # it does not run on emu either
                continue
            compared.add(name_of(info))
            moved, options = operands_of(sample)
            try:
                with DryMode(CARD):
                    dry = described(info.op(*moved, **options))
            except Exception as error:
                dry = str(error)
            if dry != real:
                different.setdefault(name_of(info), (dry, real))
    assert len(compared) > 0.95 * len(op_db)
    assert {name: it for name, it in different.items() if name not in DIFFERENT} == {}
    for name, why in DIFFERENT.items():
        if why != VALUES:  # those may be right by chance
            assert ("has no meta kernel" in str(different[name])) == (why == NO_META), name
