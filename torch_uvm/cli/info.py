"""`python -m torch_uvm info`: what is here, what is off and what to do about it, and every option.

It is there to find out what is wrong, so nothing that is wrong stops it: what cannot be found out is said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import torch_uvm
from torch_uvm import _C
from torch_uvm._patches import replace
from torch_uvm._util.arguments import accelerator
from torch_uvm._util.escaping import printable
from torch_uvm._util.runtime import known_bytes
from torch_uvm.cli import machine
from torch_uvm.cli.shortfalls import shortfalls

SUMMARY = "what is here and what is off: versions, devices, the link, options"


def _devices() -> list[dict[str, Any]]:
    here = accelerator()
    if here is None or _C.backend() == "none":
        return []
    return [
        {
            "device": f"{here.type}:{index}",
            **_C.device_properties(index),
            "budget": _C.requested_budget(index),
            "budget_bytes": _C.budget(index),
        }
        for index in range(torch.accelerator.device_count())
    ]


def collect() -> dict[str, Any]:
    """Everything that `info` prints; bytes as ints, None where there is no figure.

    What could not be found out is in ``errors``, by name; ``off`` says what is wrong and what to do.
    """
    errors: dict[str, str] = {}

    def attempt(name: str, find: Callable[[], Any], otherwise: Any = None) -> Any:
        try:
            return find()
        except Exception as error:  # anything may be missing or broken here
            errors[name] = printable(str(error).strip().split("\n")[0] or type(error).__name__)
            return otherwise

    here = attempt("accelerator", accelerator)
    facts: dict[str, Any] = {
        "torch_uvm": torch_uvm.__version__,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "built_for": "CUDA" if _C.built_with_cuda() else "CPU",
        "driver": attempt("driver", machine.driver, {"nvidia": None, "cuda": None}),
        "cuda_devices": attempt("cuda_devices", torch.cuda.device_count, 0),
        "accelerator": None if here is None else here.type,
        "backend": _C.backend(),
        "emulated": _C.backend() == "emulated",
        "enabled": torch_uvm.is_enabled(),
        "starts_with_torch": attempt("starts_with_torch", machine.starts_with_torch, False),
        "environment": machine.environment(),
        "devices": attempt("devices", _devices, []),
        "link": None,
        "managed_bytes": attempt("managed_bytes", _C.managed_bytes),
        "peak_managed_bytes": attempt("peak_managed_bytes", _C.peak_managed_bytes),
        "limit": _C.get_limit(),
        "host_limit": torch_uvm.memory.get_host_limit(),
        "replaced": sorted(name for name, there in replace.there.items() if there),
        "not_there": sorted(name for name, there in replace.there.items() if not there),
        "host_available": attempt("host_available", lambda: known_bytes(_C.host_memory_available())),
        "options": _C.describe_options(),
    }
    if facts["devices"]:
        facts["link"] = attempt("link", machine.link)
    facts["errors"] = errors
    facts["off"] = shortfalls(facts)
    return facts


def _shown(key: str, value: Any, indent: str = "") -> Iterator[str]:
    """The lines of a fact; those of a dictionary are indented."""
    if isinstance(value, dict):
        yield f"{indent}{key}" + ("" if value else " (none)")
        for name, each in value.items():
            yield from _shown(name, each, indent + "  ")
        return
    if isinstance(value, list):
        text = ", ".join(value)
    elif isinstance(value, float):
        text = f"{value:.1f} GB/s"
    elif type(value) is int and key.endswith(("bytes", "limit", "available", "memory")):
        text = _C.format_bytes(value)
    else:
        text = printable(value)
    yield from _wrapped(f"{indent}{key:<{28 - len(indent)}}{'none' if value in (None, []) else text}")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, subsequent_indent="  ")


def _text(facts: dict[str, Any], report: bool) -> str:
    lines: list[str] = []
    for key, value in facts.items():
        if key not in ("devices", "errors", "options", "off"):
            lines += _shown(key, value)
    for device in facts["devices"]:
        lines += ["", *_shown(device["device"], device)]
    if facts["off"]:
        lines += ["", "what is off, and what to do"]
    for it in facts["off"]:
        lines += [*_wrapped("- " + it["what"]), *_wrapped("  " + it["do"])]
    if report:
        changed = {it["key"]: it["value"] for it in facts["options"] if it["value"] != it["default"]}
        lines += ["", *_shown("options that are not the default", changed)]
        return "\n".join(["```", *lines, "```"])
    lines += ["", "options (TORCH_UVM_CONF=key:value,...)"]
    for option in facts["options"]:
        lines.append(f"  {option['key']:<30}{option['value']:<10}{option['description']}")
        lines.append(f"  {'':<42}default {option['default']}; accepted: {option['accepted']}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Prints the facts, for people or with --json as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m torch_uvm info", description=SUMMARY, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="one JSON object; bytes as numbers")
    parser.add_argument("--report", action="store_true", help="one block to paste into an issue")
    arguments = parser.parse_args(argv)
    if arguments.report:
        # So that the block has the budget in force, and what is replaced. It may fail on a broken machine.
        with contextlib.suppress(Exception), torch_uvm.enabled():
            torch_uvm.memory.empty(1, device=accelerator())
    facts = collect()
    text = json.dumps(facts, indent=2) if arguments.json else _text(facts, arguments.report)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head` closed the pipe; the flush at exit would raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0
