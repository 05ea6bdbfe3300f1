"""The arguments that operators write to.

The residency engine evicts operands that were only read without a write-back. It must therefore know each
argument that a kernel writes, whether or not the operator's schema declares it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _tables import backward, some, tensors_in
from test_modules import cases
from test_modules import name_of as module_name
from test_operators import is_compared, samples_of
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._python_dispatch import TorchDispatchMode

from torch_uvm import _C

# Kernels of devices that are not available here.
OF_OTHER_DEVICES = {
    "aten::_cudnn_rnn": {"dropout_state"},
    "aten::_cudnn_rnn_backward": {"dropout_state", "reserve"},
    "aten::miopen_rnn": {"dropout_state"},
    "aten::miopen_rnn_backward": {"dropout_state", "reserve"},
    "aten::cudnn_batch_norm": {"running_mean", "running_var"},
    "aten::miopen_batch_norm": {"running_mean", "running_var"},
    "aten::batch_norm_update_stats": {"running_mean", "running_var"},
    "aten::batch_norm_gather_stats": {"running_mean", "running_var"},
    "aten::batch_norm_gather_stats_with_counts": {"running_mean", "running_var"},
    "aten::_batch_norm_with_update": {"running_mean", "running_var"},
    "aten::_fused_moving_avg_obs_fq_helper": {"running_min", "running_max", "scale", "zero_point"},
    "aten::_amp_update_scale_": {"self", "growth_tracker"},
    "aten::_fused_adamw_": {"self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"},
    "aten::rrelu_with_noise": {"noise"},
    "aten::mkldnn_rnn_layer": set(),
    "aten::cudnn_batch_norm_backward": set(),
    "aten::_cudnn_rnn_flatten_weight": set(),
}


@pytest.mark.parametrize("name", OF_OTHER_DEVICES)
def test_of_other_devices(name: str) -> None:
    assert set(_C.written_arguments(name)) == OF_OTHER_DEVICES[name]


class UnsaidWrites(TorchDispatchMode):
    """Collects written arguments that the engine considers read-only."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[tuple[str, str]] = set()
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        names = [argument.name for argument in schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        written = set(_C.written_arguments(schema.name, schema.overload_name))
        storages: dict[int, str] = {}
        before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        for name in sorted(
            given, key=lambda name: name not in written
        ):  # if two arguments share a storage, the written one counts
            for tensor in tensors_in(given[name]):
                if tensor.layout is torch.strided and not tensor.is_meta:
                    storage = tensor.untyped_storage()
                    if storages.setdefault(storage._cdata, name) == name and name not in written:
                        before[storage._cdata] = (storage, storage.clone())
        results = func(*args, **kwargs)
        self.operators += 1
        for cdata, (storage, copy) in before.items():
            if storage.size() == copy.size() and not torch.equal(bytes_of(storage), bytes_of(copy)):
                self.found.add((schema.name, storages[cdata]))
        return results


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class TestKernelsOfTheCpu:
    """The emulated accelerator runs these."""

    @pytest.mark.filterwarnings("ignore")
    def test_of_all_operators(self) -> None:
        with UnsaidWrites() as mode:
            for op in op_db:
                if is_compared(op):
                    run_operator(op)
        assert mode.operators > 10_000
        assert mode.found == set()

    @pytest.mark.filterwarnings("ignore")
    def test_of_all_modules(self) -> None:
        with UnsaidWrites() as mode:
            for info in module_db:
                if torch.float32 in info.dtypes:
                    run_module(info)
        assert mode.operators > 1_000
        assert mode.found == set()

    def test_an_undeclared_write_is_found(self) -> None:
        with torch.library._scoped_library("uvm_test_writes", "DEF") as library:
            library.define("writes(Tensor x) -> Tensor")
            library.impl("writes", lambda x: x.data.fill_(1).clone(), "CPU")
            with UnsaidWrites() as mode:
                torch.ops.uvm_test_writes.writes(torch.zeros(3))
        assert mode.found == {("uvm_test_writes::writes", "x")}


def run_operator(op: OpInfo) -> None:
    for sample in samples_of(op, 1):
        try:
            backward(list(tensors_in(op(sample.input, *sample.args, **sample.kwargs))))
        except (RuntimeError, NotImplementedError):
            continue  # the CPU rejects this sample


def run_module(info: ModuleInfo) -> None:
    for module, sample in some(cases(info), module_name(info), 2):
        backward(list(tensors_in(module(*sample.forward_input.args, **sample.forward_input.kwargs))))
