"""Patches of modules of PyTorch that wait for their import: importing the compiler takes seconds."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import threading
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

Action = Callable[[ModuleType], None]

_lock = threading.Lock()
_waiting: dict[str, list[Action]] = {}


class _Finder(importlib.abc.MetaPathFinder):
    """Stays in `sys.meta_path`: another thread may be iterating over it, and would miss a finder."""

    _searching = threading.local()  # has `on` while this thread asks the other finders

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        _act_on_imported()
        if fullname not in _waiting or hasattr(self._searching, "on"):
            return None
        self._searching.on = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            del self._searching.on
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # Only now: a program may look for the spec without an import, or import again after a failure.
            execute(module)
            _act(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def _act(module: ModuleType) -> None:
    with _lock:
        actions = _waiting.pop(module.__name__, [])
    for action in actions:
        try:
            action(module)
        except Exception as error:  # the module must be importable without us
            warnings.warn(
                f"torch_uvm does not know {module.__name__} of torch {torch.__version__}: {error}; managed "
                f"tensors there may be used at an address that has changed",
                stacklevel=2,
            )


def _act_on_imported() -> None:
    for name in list(_waiting):
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _act(module)


def when_imported(name: str, action: Action) -> None:
    """Calls `action` with the module of that name: now, or right after its first import. Imports nothing.

    If it raises, for example because PyTorch has renamed something, it warns.
    """
    with _lock:
        _waiting.setdefault(name, []).append(action)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
    if name in sys.modules:
        importlib.import_module(name)  # waits for another thread that imports it
    _act_on_imported()
