"""Invalid input is refused: the exception names the received and the accepted values, and nothing changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from _spawn import Spawn

import torch_uvm
from torch_uvm import _C, emulated

ACCELERATOR = torch.accelerator.current_accelerator()
assert ACCELERATOR is not None
DEVICE = ACCELERATOR.type
COUNT = torch.accelerator.device_count()


class Bad(NamedTuple):
    call: Callable[[], Any]
    error: type[Exception]
    named: tuple[str, ...]  # parts of the message: received and accepted values


def _loose(function: Any) -> Any:
    """Removes the type of `function`, as in untyped code."""
    return function


enable, enabled, configure = _loose(torch_uvm.enable), _loose(torch_uvm.enabled), _loose(emulated.configure)
set_budget, set_host_limit = _loose(torch_uvm.set_budget), _loose(torch_uvm.set_host_limit)
set_limit, is_managed, residency = (
    _loose(torch_uvm.set_limit),
    _loose(torch_uvm.is_managed),
    _loose(emulated.residency),
)
empty, zeros, ones = (
    _loose(torch_uvm.memory.empty),
    _loose(torch_uvm.memory.zeros),
    _loose(torch_uvm.memory.ones),
)
full, empty_like = _loose(torch_uvm.memory.full), _loose(torch_uvm.memory.empty_like)


def _sparse() -> torch.Tensor:
    return torch.eye(2).to_sparse()


BAD: dict[str, Bad] = {
    # --- enable and the scopes
    "enable keyword typo": Bad(
        lambda: enable(bugdet="auto"),
        TypeError,
        ("bugdet", "'auto'", "did you mean budget?", "budget, limit, host_limit, moves"),
    ),
    "enable positional": Bad(
        lambda: enable("4GiB"), TypeError, ("keywords only", "'4GiB' (str)", "write enable(budget='4GiB')")
    ),
    "enable keyword suggested": Bad(
        lambda: enable(host_limt="1GiB"), TypeError, ("host_limt", "'1GiB'", "did you mean host_limit?")
    ),
    "enable host_limit": Bad(
        lambda: enable(host_limit="lots"), ValueError, ("host_limit='lots'", "4GiB", "None")
    ),
    "host limit": Bad(lambda: set_host_limit(-1), ValueError, ("host_limit", "-1", "4GiB", "None")),
    "budget unit abbreviated": Bad(
        lambda: set_budget("20G"), ValueError, ("budget='20G'", "did you mean 20GiB?", "'80%'")
    ),
    "limit unit abbreviated": Bad(
        lambda: set_limit("1.5 mi"), ValueError, ("'1.5 mi'", "did you mean 1.5MiB?")
    ),
    "budget share as text": Bad(lambda: set_budget("0.8"), ValueError, ("'0.8'", "did you mean 80%?")),
    "budget share as float": Bad(lambda: enable(budget=0.125), TypeError, ("0.125 (float)", "'80%'")),
    "budget of an unknown device": Bad(
        lambda: torch_uvm.get_budget(COUNT), ValueError, ("device", str(COUNT), f"'{DEVICE}'")
    ),
    "budget of the host": Bad(lambda: torch_uvm.get_budget("cpu"), ValueError, ("the host has no budget",)),
    "enable budget word": Bad(
        lambda: enable(budget="lots"), ValueError, ("budget", "lots", "'80%'", '"auto" or None')
    ),
    "enable budget negative": Bad(lambda: enable(budget=-1), ValueError, ("budget", "-1", '"auto" or None')),
    "enable budget of nothing": Bad(lambda: enable(budget=0), ValueError, ("budget", "0", '"auto" or None')),
    "enable budget type": Bad(
        lambda: enable(budget=1.5), TypeError, ("budget", "1.5 (float)", '"auto" or None')
    ),
    "enable budget beside a wrong value": Bad(
        lambda: enable(budget="1GiB", moves="x"), ValueError, ("moves", "x", '"copy"')
    ),
    "set_budget share": Bad(lambda: set_budget("101%"), ValueError, ("budget", "101%", "'80%'")),
    "set_budget host": Bad(
        lambda: set_budget("1GiB", device="cpu"), ValueError, ("device", "'cpu'", f"'{DEVICE}'")
    ),
    "set_budget device": Bad(
        lambda: set_budget("1GiB", device=COUNT), ValueError, ("device", str(COUNT), f"'{DEVICE}'")
    ),
    "enable moves word": Bad(
        lambda: enable(moves="alais"), ValueError, ("moves", "alais", '"copy" or "alias"')
    ),
    "enable moves type": Bad(
        lambda: enable(moves=True), TypeError, ("moves", "True (bool)", '"copy" or "alias"')
    ),
    "enable host_tensors type": Bad(
        lambda: enable(host_tensors="yes"), TypeError, ("host_tensors", "'yes' (str)", "True, False")
    ),
    "enable host_tensors none": Bad(
        lambda: enable(host_tensors=None), TypeError, ("host_tensors", "None", "True, False")
    ),
    "enable limit text": Bad(lambda: enable(limit="4 gigs"), ValueError, ("limit", "4 gigs", "4GiB")),
    "enable limit beside a wrong value": Bad(
        lambda: enable(limit="1GiB", moves="x"), ValueError, ("moves", "x", '"copy"')
    ),
    "enabled takes no options": Bad(
        lambda: enabled(limit="1GiB"), TypeError, ("limit", "1GiB", "takes no arguments")
    ),
    "enabled positional": Bad(
        lambda: enabled("1GiB"), TypeError, ("enabled() takes no arguments", "'1GiB' (str)")
    ),
    "enabled on a generator": Bad(
        lambda: torch_uvm.enabled()(lambda: (yield)), TypeError, ("<lambda>", "plain functions")
    ),
    "disabled on a class": Bad(lambda: torch_uvm.disabled()(Bad), TypeError, ("Bad", "plain functions")),
    # --- limits
    "limit negative": Bad(lambda: set_limit(-1), ValueError, ("-1", "4GiB", "None")),
    "limit negative text": Bad(lambda: set_limit("-4GiB"), ValueError, ("-4GiB", "None")),
    "limit unit": Bad(lambda: set_limit("4QiB"), ValueError, ("4QiB", "4GiB", "None")),
    "limit empty": Bad(lambda: set_limit(""), ValueError, ("limit=''", "4GiB", "None")),
    "limit fraction of a byte": Bad(lambda: set_limit("0.3B"), ValueError, ("0.3B", "4GiB")),
    "limit float": Bad(lambda: set_limit(4e9), TypeError, ("4000000000.0 (float)", "4GiB", "None")),
    "limit bool": Bad(lambda: set_limit(True), TypeError, ("True (bool)", "4GiB", "None")),
    "limit list": Bad(lambda: set_limit(["4GiB"]), TypeError, ("['4GiB'] (list)", "None")),
    "limit past 64 bits": Bad(lambda: set_limit(2**64), ValueError, (str(2**64), str(2**64 - 1))),
    "limit text past 64 bits": Bad(lambda: set_limit("99999999TiB"), ValueError, ("99999999TiB", "None")),
    # --- devices of the memory functions
    "memory of an unknown device": Bad(
        lambda: torch_uvm.memory.memory_allocated("banana"), ValueError, ("'banana'", "'cpu'", f"'{DEVICE}'")
    ),
    "fragmentation of meta": Bad(
        lambda: torch_uvm.memory.memory_fragmentation("meta"), ValueError, ("'meta'", "'cpu'")
    ),
    "memory of meta": Bad(lambda: torch_uvm.memory.memory_stats("meta"), ValueError, ("'meta'", "'cpu'")),
    "memory of an index too high": Bad(
        lambda: torch_uvm.memory.memory_reserved(COUNT),
        ValueError,
        (f"{COUNT} (int)", "'cpu'", f"'{DEVICE}:0'"),
    ),
    "memory of an index past int8": Bad(
        lambda: torch_uvm.memory.max_memory_allocated(10**6), ValueError, ("1000000 (int)", "'cpu'")
    ),
    "memory of a negative index": Bad(
        lambda: torch_uvm.memory.max_memory_reserved(-1), ValueError, ("-1 (int)", "'cpu'")
    ),
    "memory of a device index too high": Bad(
        lambda: torch_uvm.memory_summary(f"{DEVICE}:{COUNT}"),
        ValueError,
        (f"{DEVICE}:{COUNT}", f"'{DEVICE}:0'"),
    ),
    "memory of a second host": Bad(
        lambda: torch_uvm.memory.memory_snapshot(torch.device("cpu", 1)), ValueError, ("index=1", "'cpu'")
    ),
    "memory of a float": Bad(
        lambda: _loose(torch_uvm.memory.memory_allocated)(0.0), TypeError, ("0.0 (float)", "'cpu'")
    ),
    "reset of a bool": Bad(
        lambda: torch_uvm.memory.reset_peak_memory_stats(True), TypeError, ("True (bool)", "'cpu'")
    ),
    "reset keyword": Bad(
        lambda: _loose(torch_uvm.memory.reset_accumulated_memory_stats)(home="cpu"),
        TypeError,
        ("home", "device"),
    ),
    # --- tensors
    "is_managed of a list": Bad(lambda: is_managed([1.0]), TypeError, ("[1.0] (list)", "torch.Tensor")),
    "empty device": Bad(lambda: empty(2, device="banana"), ValueError, ("'banana'", f"'{DEVICE}'")),
    "empty on meta": Bad(lambda: empty(2, device="meta"), ValueError, ("'meta'", f"'{DEVICE}'")),
    "empty index": Bad(lambda: empty(2, device=COUNT), ValueError, (f"{COUNT} (int)", f"'{DEVICE}'")),
    "empty without a size": Bad(lambda: empty(), TypeError, ("size",)),
    "empty negative": Bad(lambda: empty(2, -3), RuntimeError, ("[2, -3]",)),
    "empty fraction": Bad(lambda: empty(2.5), TypeError, ("ints, not float",)),
    "empty text": Bad(lambda: empty("23"), TypeError, ("ints, not str",)),
    "empty past all memory": Bad(lambda: empty(2**62, 2**62), RuntimeError, (str(2**62),)),
    "empty keyword": Bad(lambda: empty(2, dtpye=torch.int8), TypeError, ("dtpye", "torch.int8", "dtype")),
    "empty memory format": Bad(
        lambda: empty(2, memory_format=torch.preserve_format), RuntimeError, ("memory format",)
    ),
    "empty channels last of 2 dimensions": Bad(
        lambda: empty(2, 3, memory_format=torch.channels_last), RuntimeError, ("rank 4",)
    ),
    "empty quantised": Bad(lambda: empty(2, dtype=torch.qint8), ValueError, ("torch.qint8", "dense tensors")),
    "zeros dtype": Bad(lambda: zeros(2, dtype="float32"), TypeError, ("torch.dtype, not str",)),
    "ones requires_grad of ints": Bad(
        lambda: ones(2, dtype=torch.int64, requires_grad=True), RuntimeError, ("floating point",)
    ),
    "ones requires_grad type": Bad(lambda: ones(2, requires_grad=1), TypeError, ("bool, not int",)),
    "full size": Bad(lambda: full(2, 7), TypeError, ("ints, not int",)),
    "full value": Bad(lambda: full((2,), "7"), TypeError, ("Number, not str",)),
    "full value that does not fit": Bad(
        lambda: full((2,), 1000, dtype=torch.int8), ValueError, ("1000 (int)", "int8")
    ),
    "full value past 64 bits": Bad(lambda: full((2,), 2**64), ValueError, (str(2**64),)),
    "empty_like of a number": Bad(lambda: empty_like(3), TypeError, ("3 (int)", "torch.Tensor")),
    "empty_like of sparse": Bad(lambda: empty_like(_sparse()), RuntimeError, ("strided",)),
    "empty_like of meta": Bad(
        lambda: empty_like(torch.empty(2, device="meta")), ValueError, ("meta", f"'{DEVICE}'")
    ),
    # --- the emulated accelerator
    "configure no devices": Bad(lambda: configure(devices=0), ValueError, ("devices", "0", "from 1 to 64")),
    "configure too many devices": Bad(lambda: configure(devices=65), ValueError, ("65", "from 1 to 64")),
    "configure devices text": Bad(lambda: configure(devices="2"), TypeError, ("'2' (str)", "from 1 to 64")),
    "configure memory text": Bad(lambda: configure(memory="big"), ValueError, ("memory", "big", "4GiB")),
    "configure memory too small": Bad(
        lambda: configure(memory="1KiB"), ValueError, ("1KiB", "at least 1048576 bytes")
    ),
    "configure profile": Bad(lambda: configure(profile="h2000"), ValueError, ("h2000", "h200")),
    "configure profile type": Bad(lambda: configure(profile=200), TypeError, ("200 (int)", "h200")),
    "configure seed": Bad(lambda: configure(seed=-1), ValueError, ("seed", "-1", "from 0 to")),
    "configure seed type": Bad(lambda: configure(seed="x"), TypeError, ("seed", "'x' (str)", "from 0 to")),
    "configure keyword": Bad(
        lambda: configure(device=2), TypeError, ("device=2", "devices, memory, profile, seed")
    ),
    "configure after first use": Bad(
        lambda: configure(devices=2), RuntimeError, ("in use already", "before the first tensor")
    ),
    "counters of the host": Bad(lambda: emulated.counters("cpu"), ValueError, ("'cpu'", "emulated device")),
    "counters of no device": Bad(lambda: emulated.counters(COUNT), ValueError, (f"{COUNT} (int)", "'emu'")),
    "timeline of None": Bad(lambda: _loose(emulated.timeline)(None), TypeError, ("None", "accepted")),
    "residency of a number": Bad(lambda: residency(1), TypeError, ("1 (int)", "torch.Tensor")),
    "residency of an ordinary tensor": Bad(
        lambda: residency(torch.ones(2)), ValueError, ("cpu", "not managed", "managed tensors")
    ),
}


def _fingerprint() -> dict[str, Any]:
    """All state that a refused call might have changed."""
    return {
        "enabled": torch_uvm.is_enabled(),
        "limit": _C.get_limit(),
        "options": _C.describe_options(),
        "stats": torch_uvm.memory.memory_stats(),
        "homes": [torch_uvm.memory.memory_stats(home) for home in ("cpu", *range(COUNT))],
        "managed": (_C.managed_bytes(), _C.peak_managed_bytes()),
        "resident": [emulated.resident_bytes(index) for index in range(COUNT)],
        "counters": emulated.counters(),
        "device": torch.accelerator.current_device_index(),
        "default": torch.get_default_dtype(),
    }


@pytest.fixture(scope="module", autouse=True)
def in_use() -> None:
    """Makes the figures nonzero."""
    torch_uvm.memory.ones(1000, device=DEVICE)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name_and_changes_nothing(name: str) -> None:
    bad = BAD[name]
    for set_up in (torch_uvm.disable, lambda: torch_uvm.enable(limit="1TiB")):
        set_up()
        before = _fingerprint()
        with pytest.raises(bad.error) as caught:
            bad.call()
        assert type(caught.value) is bad.error
        for part in bad.named:
            assert part in str(caught.value)
        assert _fingerprint() == before


# --- the environment: a wrong value fails the import

#: Variables, the error, and the names in its message.
BAD_ENVIRONMENTS: list[tuple[dict[str, str], str, list[str]]] = [
    ({"TORCH_UVM": "yes"}, "ValueError", ["TORCH_UVM='yes'", "1, true, on, 0, false, off"]),
    (
        {"PYTORCH_ENABLE_UNIFIED_MEMORY": "2"},
        "ValueError",
        ["PYTORCH_ENABLE_UNIFIED_MEMORY='2'", "1, true, on"],
    ),
    ({"TORCH_UVM_DEVICE": "emulated"}, "ValueError", ["TORCH_UVM_DEVICE='emulated'", "accepted: emu"]),
    ({"TORCH_UVM_CONF": "limt:4GiB"}, "ValueError", ["TORCH_UVM_CONF", "limt", "limit"]),
    ({"TORCH_UVM_CONF": "limit:4GiB,limit:8GiB"}, "ValueError", ["limit", "twice"]),
    ({"TORCH_UVM_CONF": "limit:four"}, "ValueError", ["limit", "four", "bytes such as 4GiB, or none"]),
    ({"TORCH_UVM_CONF": "limit"}, "ValueError", ["limit", "key:value"]),
    ({"TORCH_UVM_CONF": "budget:0"}, "ValueError", ["budget", '"0"', "a share of its memory such as 80%"]),
    ({"TORCH_UVM_CONF": "host_limit:half"}, "ValueError", ["host_limit", "half", "such as 64GiB, auto"]),
    ({"TORCH_UVM_CONF": "populate:perhaps"}, "ValueError", ["populate", "perhaps", "true, false"]),
    ({"TORCH_UVM_CONF": "emulated_devices:0"}, "ValueError", ["emulated_devices", "0", "1 to 64"]),
    ({"TORCH_UVM_CONF": "emulated_memory:-1"}, "ValueError", ["emulated_memory", "-1", "1MiB"]),
    ({"TORCH_UVM_CONF": "emulated_profile:h2000"}, "ValueError", ["emulated_profile", "h2000", "h200"]),
    ({"TORCH_UVM_CONF": "emulated_schedule_seed:x"}, "ValueError", ["emulated_schedule_seed", "x", "none"]),
    ({"TORCH_UVM": "1", "TORCH_UVM_CONF": "a:b"}, "ValueError", ["TORCH_UVM_CONF", '"a"']),
]


def test_a_wrong_environment_fails_the_import_by_name_and_changes_nothing(spawn: Spawn) -> None:
    done = spawn(
        """
        import importlib, json, os, sys
        import torch
        found = []
        for variables in json.loads(sys.argv[1]):
            os.environ.update(variables)
            try:
                importlib.import_module("torch_uvm")
                found.append(["nothing", ""])
            except Exception as error:
                found.append([type(error).__name__, str(error)])
            for name in variables:
                del os.environ[name]
            assert "torch_uvm" not in sys.modules
            assert torch._C._get_privateuse1_backend_name() == "privateuseone"
        import torch_uvm
        assert not torch_uvm.is_enabled() and torch_uvm._C.get_limit() is None
        assert all(option["value"] == option["default"] for option in torch_uvm._C.describe_options())
        print(json.dumps(found))
        """,
        args=[json.dumps([variables for variables, _, _ in BAD_ENVIRONMENTS])],
    )
    found = json.loads(done.stdout)
    for (variables, error, named), (kind, message) in zip(BAD_ENVIRONMENTS, found, strict=True):
        assert kind == error, (variables, message)
        for part in named:
            assert part in message, (variables, message)


def test_there_are_enough_cases() -> None:
    assert len(BAD) + len(BAD_ENVIRONMENTS) >= 40
