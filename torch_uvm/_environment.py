"""The environment variables, read when torch_uvm is imported.

TORCH_UVM                       1/true/on: turns the switch on; 0/false/off: does not
PYTORCH_ENABLE_UNIFIED_MEMORY   the same, by RFC-0023's name; TORCH_UVM takes precedence
TORCH_UVM_DEVICE                emu: registers the emulated accelerator, also beside a GPU
TORCH_UVM_CONF                  key:value,... for the option table (`python -m torch_uvm info` prints it)
TORCH_UVM_REPORT                a path: writes a report there, as `run --report` does (docs/plan.md)

An empty value is the same as none. A wrong value fails the import with an error that names it, before
anything has changed. An unknown variable that begins with TORCH_UVM_ is ignored with a warning.
"""

from __future__ import annotations

import logging
import os
import warnings

import torch

from torch_uvm import _C
from torch_uvm._residency import budget
from torch_uvm._switch.switch import enable
from torch_uvm._util.arguments import did_you_mean
from torch_uvm._util.runtime import has_gpu

log = logging.getLogger("torch_uvm")

#: The variables for users.
OURS = ("TORCH_UVM", "TORCH_UVM_DEVICE", "TORCH_UVM_CONF", "TORCH_UVM_REPORT")

#: Other variables with this prefix: set by the package itself, and for its build and tests.
DEVELOPERS = frozenset(
    f"TORCH_UVM_{name}"
    for name in "CALLS CHECKED CHECK_EVERY CUDA FAULTS REPORT_OF REQUIRE_CUDA SANITIZE TEST_BINDINGS "
    "TEST_CUDA TEST_TABLES UNITY".split()
)

_SWITCHES = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def _switch(name: str) -> bool | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if text.lower() not in _SWITCHES:
        raise ValueError(f"{name}={text!r} in the environment; accepted: {', '.join(_SWITCHES)}")
    return _SWITCHES[text.lower()]


def _check_names() -> None:
    for name in sorted(os.environ):
        if name.startswith("TORCH_UVM_") and name not in DEVELOPERS.union(OURS) and os.environ[name].strip():
            warnings.warn(
                f"{name}={os.environ[name]!r} in the environment is no variable of torch_uvm"
                f"{did_you_mean(name, OURS)}; known: {', '.join(OURS)}; options such as budget and limit are "
                f"set by TORCH_UVM_CONF=key:value,...",
                stacklevel=3,
            )


def _is_other_accelerator_here() -> bool:
    here = torch.accelerator.current_accelerator()
    # CUDA is not asked whether it is available: that would initialise it.
    if here is None or here.type == "cuda":
        return False
    return torch.accelerator.current_accelerator(check_available=True) is not None


def apply_environment() -> None:
    """Applies the variables above; called once, at the end of `import torch_uvm`."""
    _check_names()
    ours, rfc = _switch("TORCH_UVM"), _switch("PYTORCH_ENABLE_UNIFIED_MEMORY")
    device = os.environ.get("TORCH_UVM_DEVICE", "").strip()
    if device not in ("", "emu"):
        raise ValueError(f"TORCH_UVM_DEVICE={device!r} in the environment; accepted: emu")
    options = os.environ.get("TORCH_UVM_CONF", "")
    try:
        _C.load_options(options)
    except ValueError as error:
        raise ValueError(f"TORCH_UVM_CONF={options!r} in the environment: {error}") from None
    if not device and has_gpu():
        if _C.built_with_cuda():
            _C.cuda_register()
    elif device or not _is_other_accelerator_here():
        from torch_uvm.emulated._register import register

        register()
        # With a CUDA build of torch a GPU is expected, so the message must show without any logging set up.
        surprising = not device and torch.version.cuda is not None
        log.log(
            logging.WARNING if surprising else logging.INFO,
            "using the emulated accelerator 'emu': %s; its figures are modelled, and `python -m torch_uvm "
            "info` says what is off",
            "TORCH_UVM_DEVICE=emu asks for it" if device else "there is no GPU here",
        )
    if _C.requested_budget(0) not in (None, "none"):
        budget.warn_of_few_bytes(str(_C.requested_budget(0)), "TORCH_UVM_CONF: budget")
    if rfc if ours is None else ours:
        enable()
    if os.environ.get("TORCH_UVM_REPORT", "").strip():
        from torch_uvm import report

        report.start_from_environment()
