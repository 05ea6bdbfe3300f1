"""Small programs of many kinds give the same results on the accelerator as on the CPU, to the last bit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _run_programs
import pytest
import torch
from _programs import PROGRAMS
from _run_programs import same
from _spawn import Spawn

SCRIPT = Path(_run_programs.__file__)

CONF = {
    # Copies are delayed, so a missing wait shows as a wrong result.
    "managed": "budget:none,emulated_memory:2MiB,emulated_devices:3,emulated_schedule_seed:5",
    "plain": "emulated_memory:128MiB,emulated_devices:3,emulated_schedule_seed:5",
}


@pytest.fixture(scope="module", name="outcomes")
def run_in_children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    spawn = Spawn(tmp_path_factory.mktemp("programs"))
    yield {
        how: json.loads(spawn(args=[str(SCRIPT), how], env={"TORCH_UVM_CONF": conf}).stdout.splitlines()[-1])
        for how, conf in CONF.items()
    }


@pytest.mark.parametrize("how", CONF)
@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_to_cpu(outcomes: dict[str, Any], name: str, how: str) -> None:
    assert outcomes[how]["findings"][name] == ""


def test_pages_were_evicted(outcomes: dict[str, Any]) -> None:
    assert outcomes["managed"]["evicted"] > 1000
    assert outcomes["plain"]["evicted"] == 0


def test_a_difference_is_noticed() -> None:
    one = torch.ones(4)
    assert same(one, one.clone())
    assert not same(one, torch.nextafter(one, 2 * one))
    assert not same(1.0, math.nextafter(1.0, 2.0))
