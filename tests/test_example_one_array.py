"""The example of one array shared by all libraries: those that took part, those that are missing, and
copies."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torch_uvm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

pytest.importorskip("numpy")
import one_array as example  # noqa: E402


@pytest.fixture
def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


def test_installed_libraries_share_the_bytes(
    device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main()
    printed = capsys.readouterr().out
    came = [visitor for visitor in example.VISITORS if example.missing(visitor, device) is None]
    assert [(one.library, one.protocol) for one in came[:4]] == [
        ("torch", "itself"),
        ("numpy", "the CPU's label"),
        ("numpy", "DLPack"),
        ("torch", "DLPack"),
    ]
    sum_of_all = sum(10 ** example.VISITORS.index(visitor) for visitor in came)
    assert f"All of them see {sum_of_all:,}, and no byte was copied." in printed
    lines = [line for line in printed.splitlines() if "0x" in line]
    assert len(lines) == len(came) and len({line.split()[-1] for line in lines}) == 1
    assert printed.count("left out: ") == len(example.VISITORS) - len(came)


@pytest.mark.parametrize("visitor", example.VISITORS, ids=lambda one: f"{one.library}, {one.protocol}")
def test_each_is_given_the_tensors_own_bytes(device: torch.device, visitor: example.Visitor) -> None:
    if reason := example.missing(visitor, device):
        pytest.skip(reason)
    x = torch_uvm.memory.zeros(1000, dtype=torch.int64)
    assert example.visit(x, visitor, 5) == x.data_ptr()
    assert x.sum().item() == 5000


def test_a_copy_is_noticed() -> None:
    x = torch_uvm.memory.zeros(1000, dtype=torch.int64)
    copies = replace(example.VISITORS[0], take=lambda torch, x: x.clone())
    with pytest.raises(AssertionError, match="a copy: torch has 0x"):
        example.visit(x, copies, 5)
    lies = replace(copies, address=lambda array: x.data_ptr())
    with pytest.raises(AssertionError, match="torch wrote 5, and 0 is there after 0"):
        example.visit(x, lies, 5)


def test_missing_libraries_are_listed(device: torch.device) -> None:
    absent = replace(example.VISITORS[0], library="no_such_library")
    assert example.missing(absent, device) == "not installed"
    for visitor in example.VISITORS:
        if visitor.needs_cuda and device.type != "cuda":
            assert example.missing(visitor, device) == f"needs CUDA; this is {device}"
