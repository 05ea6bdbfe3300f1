"""What is missing on this machine, and what to do about it: rules over the facts that `info` collects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Facts = dict[str, Any]
Shortfall = tuple[str, str]  # the fact, and the remedy


def _version(text: str | None) -> tuple[int, int]:
    major, _, minor = (text or "0").partition(".")
    return int(major), int(minor.partition(".")[0] or 0)


def _no_gpu(facts: Facts) -> Iterator[Shortfall]:
    driver, wanted = facts["driver"] or {}, facts["torch_cuda"]
    if wanted is None:
        if driver.get("nvidia"):
            yield (
                f"this torch is built without CUDA, and there is an NVIDIA driver ({driver['nvidia']})",
                "install a CUDA build of torch, then build torch_uvm again against it",
            )
        return
    if facts["cuda_devices"]:
        return
    if driver.get("cuda") is None:
        yield (
            f"torch is built for CUDA {wanted}, but finds no driver",
            "install NVIDIA's driver; in a container, pass the GPUs through (--gpus all)",
        )
    elif _version(driver["cuda"])[0] < _version(wanted)[0]:
        yield (
            f"the driver runs CUDA {driver['cuda']} at most, but torch is built for CUDA {wanted}",
            "update the driver, or install a torch for that CUDA",
        )
    else:
        yield (
            f"torch is built for CUDA {wanted}, but finds no GPU",
            "check CUDA_VISIBLE_DEVICES, and what nvidia-smi lists",
        )


def _extension(facts: Facts) -> Iterator[Shortfall]:
    if facts["torch_cuda"] is not None and facts["built_for"] != "CUDA":
        yield (
            "torch is built with CUDA, but torch_uvm without it",
            "build it again without TORCH_UVM_CUDA=0: pip install --no-build-isolation .",
        )
    if facts["backend"] == "none":
        yield (
            f"there is no managed memory for the accelerator {facts['accelerator']}",
            "TORCH_UVM_DEVICE=emu uses the emulated one",
        )
    elif facts["emulated"]:
        yield (
            "the accelerator is emulated: results are real, times are modelled, and nothing is faster",
            "use a GPU for work; this is for trying things out, and for tests",
        )


def _devices(facts: Facts) -> Iterator[Shortfall]:
    for device in facts["devices"]:
        if not device["managed_memory"]:
            yield f"{device['device']} has no managed memory", "use a GPU of compute capability 6.0 or later"
        elif not device["concurrent_managed_access"]:
            yield (
                f"{device['device']} cannot share pages with the CPU while it runs (concurrentManagedAccess "
                "is 0): hints do nothing, and the CPU may not touch managed tensors while a kernel runs",
                "use Linux itself, not WSL or Windows, and a GPU of compute capability 6.0 or later",
            )
    for device in facts["devices"]:
        if device["one_memory"]:
            yield (
                f"{device['device']} has one memory with the host: nothing has to move, so there is no "
                "engine, and no budget is in force",
                "nothing: it is as it should be; set a limit to bound managed memory",
            )
        elif device["budget"] == "none":
            yield (
                f"{device['device']} has no budget: the driver moves pages on access",
                'run --budget auto, or enable(budget="auto")',
            )
    total = sum(device["total_memory"] for device in facts["devices"] if not device["one_memory"])
    if facts["backend"] == "cuda" and facts["host_available"] is not None and facts["host_available"] < total:
        yield (
            "the host has less memory available than the devices have, and must hold what does not fit on "
            "them",
            "free memory on the host, or raise the container's limit",
        )


def _settings(facts: Facts) -> Iterator[Shortfall]:
    if not facts["enabled"]:
        yield (
            "the switch is off: new tensors are not managed",
            "run python -m torch_uvm run SCRIPT, set TORCH_UVM=1, or call torch_uvm.enable()",
        )
    if not facts["starts_with_torch"]:
        yield (
            "TORCH_UVM=1 does nothing in a script that does not import torch_uvm: there is no entry point of "
            "an installed package, or TORCH_DEVICE_BACKEND_AUTOLOAD is 0",
            "pip install torch_uvm, or import it in the script",
        )
    if facts["limit"] is None:
        yield (
            "there is no limit: managed memory may use all that the host has available",
            "on a shared machine, set one: run --limit, TORCH_UVM_CONF=limit:64GiB",
        )


def shortfalls(facts: Facts) -> list[dict[str, str]]:
    """Every shortfall: the fact ("what"), and the remedy ("do")."""
    found = [it for rule in (_no_gpu, _extension, _devices, _settings) for it in rule(facts)]
    for name, error in facts["errors"].items():
        found.append((f"{name} is unknown: {error}", "nothing: the rest is correct"))
    return [{"what": what, "do": do} for what, do in found]
