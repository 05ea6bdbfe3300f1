"""Public names of version 0.1 still work, and say where they are now."""

from __future__ import annotations

import pytest

import torch_uvm
from torch_uvm import _RENAMED as RENAMED


def test_the_names_at_the_top() -> None:
    assert len(torch_uvm.__all__) == 24
    assert not set(torch_uvm.__all__) & set(RENAMED)


@pytest.mark.parametrize("name", ["zeros", "residency_stats", "Allocator", "record_accesses", "arenas"])
def test_an_old_name_works_with_a_warning(name: str) -> None:
    with pytest.warns(FutureWarning, match=f"torch_uvm.{name} is now {RENAMED[name]}") as caught:
        found = getattr(torch_uvm, name)
    assert caught[0].filename == __file__
    module, _, last = RENAMED[name].rpartition(".")
    assert found is getattr(__import__(module, fromlist=[last]), last)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'torch_uvm' has no attribute 'zeroes'"):
        _ = torch_uvm.zeroes  # type: ignore[attr-defined]
