"""Scopes of `torch_uvm.enabled()` that overlap a profiler's, end on another thread, or were never entered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_uvm


class TestScopes:
    @pytest.mark.parametrize("profile", [torch.profiler.profile, torch.autograd.profiler.profile])
    def test_profiler_that_ends_inside(self, profile: Callable[[], Any]) -> None:
        profiler = profile().__enter__()
        with torch_uvm.enabled():
            torch.ones(3, device="emu").add(1)
            profiler.__exit__(None, None, None)
            assert torch_uvm.is_enabled()
        assert not torch_uvm.is_enabled()

    def test_profiler_that_starts_inside(self) -> None:
        with torch_uvm.enabled():
            profiler = torch.profiler.profile().__enter__()
        assert not torch_uvm.is_enabled()
        with torch_uvm.enabled():
            pass
        profiler.__exit__(None, None, None)
        assert not torch_uvm.is_enabled()

    def test_generator_closed_by_another_thread(self) -> None:
        def generate() -> Iterator[bool]:
            with torch_uvm.enabled():
                yield torch_uvm.is_enabled()

        generator = generate()
        assert next(generator)
        errors: list[BaseException] = []

        def close() -> None:
            try:
                generator.close()  # type: ignore[attr-defined]
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=close)
        thread.start()
        thread.join()
        assert not errors
        assert not torch_uvm.is_enabled()

    def test_left_but_not_open(self) -> None:
        with pytest.raises(RuntimeError, match=r"torch_uvm.enabled\(\) is left, but not open"):
            torch_uvm.enabled().__exit__(None, None, None)
