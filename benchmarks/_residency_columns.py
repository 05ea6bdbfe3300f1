"""The compared ways to train. Each is a column of the table and runs in its own process."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from _networks import Transformer, checkpointed, fused_adamw
from _runs import GIB, LIMIT, MOST_BUDGET
from _workloads import NotHere, Workload
from torch import nn


def bindings() -> Any:
    """torch_uvm's extension. Imported here, because columns without torch_uvm must not load it."""
    return importlib.import_module("torch_uvm._C")


def needed(module: str) -> Any:
    """A package of a peer.

    Raises:
        NotHere: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotHere(f"{module} cannot be imported: {error}") from None


class Column:
    """Plain PyTorch: everything stays on the device. Subclasses override what differs."""

    settles = 0  # further steps between the warm-up and the measured ones

    def __init__(self, device: torch.device, budget: int | None, trace: str | None) -> None:
        self.device, self.budget, self.trace = device, budget, trace

    def start(self) -> None:
        """Called before any allocation."""

    def adapt(self, workload: Workload) -> None:
        """Called before the optimizer is made."""

    def make_optimizer(self, workload: Workload) -> torch.optim.Optimizer:
        return workload.optimizer(workload.trained())

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """The scope in which forward runs."""
        return contextlib.nullcontext()

    def statistics(self) -> dict[str, Any]:
        """The engine's statistics; empty without the engine."""
        return {}

    def is_settled(self) -> bool:
        """Whether steps are those that a long run has."""
        return True

    def native_reserved(self) -> int:
        """Bytes reserved by PyTorch's own allocator."""
        return int(torch.cuda.memory_reserved()) if self.device.type == "cuda" else 0

    def finish(self) -> None:
        """Called after the last step. Raises if the column broke a rule."""


class InCore(Column):
    def start(self) -> None:
        assert "torch_uvm" not in sys.modules


class SaveOnCpu(Column):
    """torch.autograd.graph.save_on_cpu(pin_memory=True)."""

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")


class Fsdp2(Column):
    """fully_shard of each block and of the model, with CPUOffloadPolicy, on one GPU."""

    def start(self) -> None:
        import torch.distributed as dist

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        backends = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "cpu:gloo"
        dist.init_process_group(backends, rank=0, world_size=1)

    def adapt(self, workload: Workload) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        model = workload.model
        if not isinstance(model, Transformer):
            raise NotHere("FSDP2 is run with the transformer only")
        mesh = init_device_mesh(self.device.type, (1,))
        policy = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, offload_policy=policy)

    def finish(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class CpuOffloadOptimizer(Column):
    """torchao's CPUOffloadOptimizer: the state is on the host, where the CPU updates a copy of the
    parameters. Gradients leave the device during backward."""

    def start(self) -> None:
        needed("torchao.optim")

    def make_optimizer(self, workload: Workload) -> torch.optim.Optimizer:
        if workload.optimizer is not fused_adamw:
            raise NotHere("CPUOffloadOptimizer is run with AdamW only")
        offloading = needed("torchao.optim").CPUOffloadOptimizer
        try:
            made: torch.optim.Optimizer = offloading(
                workload.trained(), torch.optim.AdamW, offload_gradients=True, fused=True
            )
        except AssertionError as error:  # its devices are CUDA's and Intel's
            raise NotHere(f"CPUOffloadOptimizer: {error}") from None
        return made


class OffloadActivations(Column):
    """TRL's OffloadActivations around the forward, as its documentation has it: tensors saved for backward
    are copied to the host on a stream of their own, and back ahead of their use."""

    scope: contextlib.AbstractContextManager[Any]

    def start(self) -> None:
        needed("trl.models.activation_offloading")
        if self.device.type == "cpu":
            raise NotHere("OffloadActivations needs an accelerator")

    def adapt(self, workload: Workload) -> None:
        offloading = needed("trl.models.activation_offloading")
        self.scope = offloading.get_act_offloading_ctx_manager(workload.model, warn_if_no_head=False)

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        return self.scope


class CheckpointOffload(Column):
    """transformers' gradient_checkpointing_enable(offload=True), which Trainer calls for
    `gradient_checkpointing_kwargs={"offload": True}`. In models that are not transformers' it is what that
    does: torch's save_on_cpu around each checkpoint."""

    def adapt(self, workload: Workload) -> None:
        model: Any = workload.model
        pinned = self.device.type == "cuda"
        if hasattr(model, "gradient_checkpointing_enable"):
            model.gradient_checkpointing_enable(offload=True)
        elif getattr(model, "run", None) is checkpointed:

            def offloaded(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
                with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
                    return checkpointed(block, x)

            model.run = offloaded
        else:
            raise NotHere("the model has no checkpoints")


class Engine(Column):
    """torch_uvm with a budget. The engine decides whether optimizer state is used in place or fetched."""

    optimizer = "in_place"

    def start(self) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
        from _gpu_guard import Guard, Refused, check_room

        import torch_uvm

        if self.device.type == "cuda":
            try:
                check_room(LIMIT)
            except Refused as error:
                raise NotHere(f"not safe to run: {error}") from None
        elif self.device.type != "emu":
            raise NotHere(f"torch_uvm has no runtime for {self.device.type}")
        self.guard = Guard(LIMIT).hold()
        if self.budget is not None and self.budget > MOST_BUDGET:
            most = f"at most {MOST_BUDGET / GIB:.1f} GiB here"
            raise NotHere(f"a budget of {self.budget / GIB:.2f} GiB; {most}")
        torch_uvm.enable(budget=self.budget, limit=LIMIT, optimizer=self.optimizer)

    def statistics(self) -> dict[str, Any]:
        found: dict[str, Any] = bindings().residency_stats()
        return found

    def is_settled(self) -> bool:
        """A schedule is chosen."""
        settled: bool = bindings().is_settled()
        return settled

    def lift_budget(self) -> None:
        """Gives the engine all memory that it may have here."""
        bindings().set_budget(0, MOST_BUDGET, True)

    @contextlib.contextmanager
    def record(self, path: str) -> Any:
        """The scope in which accesses of steps are recorded to a file."""
        bindings().start_recording_accesses(path)
        try:
            yield
        finally:
            bindings().stop_recording_accesses()

    def native_reserved(self) -> int:
        if self.device.type != "cuda":
            return 0
        managed: int = bindings().memory_stats(self.device)["reserved_bytes.all.current"]
        return int(torch.cuda.memory_reserved()) - managed

    def finish(self) -> None:
        self.guard.check()


class EngineDeferred(Engine):
    """The same with deferred updates: each parameter's update runs before its next use."""

    optimizer = "deferred"
    settles = 2  # the first step has no pending updates, so steps repeat, and are scheduled, one step later


class EngineAuto(Engine):
    """The same with `optimizer="auto"`, measured once it has decided."""

    optimizer = "auto"

    def is_settled(self) -> bool:
        updates = importlib.import_module("torch_uvm._patches.deferred_updates")
        return bool(updates.has_decided()) and super().is_settled()


COLUMNS: dict[str, type[Column]] = {
    "in core": InCore,
    "engine": Engine,
    "engine, deferred": EngineDeferred,
    "engine, auto": EngineAuto,
    "save_on_cpu": SaveOnCpu,
    "FSDP2 offload": Fsdp2,
    "CPUOffloadOptimizer": CpuOffloadOptimizer,
    "OffloadActivations": OffloadActivations,
    "checkpoint offload": CheckpointOffload,
}
