"""Whether new tensors on the accelerator are managed: the process-wide switch, and scopes of threads."""

from __future__ import annotations

from types import EllipsisType

from torch_uvm import _C
from torch_uvm._patches import deferred_updates, install, tensor_to
from torch_uvm._residency import budget as budgets
from torch_uvm._residency.limits import get_host_limit, host_limit_text
from torch_uvm._util.arguments import check_flag, check_word, exact_keywords, limit_bytes
from torch_uvm._util.log import log
from torch_uvm._util.runtime import check_runtime
from torch_uvm._util.scopes import ReentrantScope


@exact_keywords
def enable(
    *,
    budget: int | str | None | EllipsisType = ...,
    limit: int | str | None = None,
    host_limit: int | str | None = None,
    moves: str = "copy",
    host_tensors: bool = False,
    optimizer: str | EllipsisType = ...,
) -> None:
    """Turns managed memory on for the process: new tensors on the accelerator are managed.

    It may be called at any time. Existing tensors keep the memory they have. A scope that is open on the
    calling thread (`enabled`, `disabled`) still decides there. Each call sets `moves` and `host_tensors`.

    Args:
        budget: the device-resident bytes of managed tensors, as `set_budget` takes it. If omitted (`...`):
            what was requested before, here or in TORCH_UVM_CONF, else "auto".
        limit, host_limit: as `set_limit` and `set_host_limit` take them. None keeps what was set before; the
            word "none" removes it.
        moves: what plain `.to`, `.cpu()`, `.cuda()` and `Module.to` do with managed tensors while the switch
            is on. "copy": new memory, as in PyTorch. "alias": if only the device changes they move, as
            `torch_uvm.to` does, and the result shares the bytes; `copy=True` still copies. A program that
            uses `.cpu()` to take a snapshot then sees the snapshot change.
        host_tensors: whether CPU tensors of at least 1 MiB are managed, too, so that moving them to the
            accelerator copies nothing.
        optimizer: when a step of torch.optim's Adam, AdamW, SGD and others updates large parameters that
            have a budget. "in_place": during the step. "deferred": each parameter at its next use, so that
            its transfers overlap earlier computation; every access sees the same bits as after an immediate
            step. "auto": deferred once the budget is short (docs/how-it-works.md). If omitted (`...`): as for
            `budget`.

    Raises:
        TypeError, ValueError: a keyword or value that is not accepted. Nothing has changed.
        RuntimeError: there is no runtime for this machine's accelerator.

    >>> torch_uvm.enable(limit="4GiB")
    """
    asked = None if budget is ... else budgets.budget_text(budget)
    check_word("moves", moves, ("copy", "alias"))
    check_flag("host_tensors", host_tensors, (True, False))
    asked_optimizer = deferred_updates.chosen() if isinstance(optimizer, EllipsisType) else optimizer
    check_word("optimizer", asked_optimizer, ("in_place", "deferred", "auto"))
    figure = limit_bytes(limit)
    host_text = host_limit_text(host_limit)
    check_runtime("enable()", now=host_tensors)
    install.for_managed_tensors()
    if limit is not None:
        _C.set_limit(figure)
    if host_limit is not None:
        _C.set_option("host_limit", host_text)
    if asked is None:
        budgets.request_default()
        if limit is not None:
            budgets.warn_of_budgets()
    else:
        budgets.request(asked)
    tensor_to.choose_moves(moves == "alias")
    deferred_updates.choose(asked_optimizer)
    _C.set_host_tensors(host_tensors)
    _C.set_enabled(True)
    log.info(
        "on: budget %s, limit %s, host limit %s, moves %s, host tensors %s, optimizer %s",
        _C.requested_budget(0),
        _C.get_limit(),
        get_host_limit(),
        moves,
        host_tensors,
        asked_optimizer,
    )


@exact_keywords
def disable() -> None:
    """Turns managed memory off for the process: new tensors get ordinary memory again.

    Managed tensors stay managed, and usable, until they are freed. The limit stays. Deferred optimizer
    updates are run.
    """
    _C.set_enabled(False)
    _C.flush_all_pending()
    log.info("off: new tensors are not managed")


@exact_keywords
def is_enabled() -> bool:
    """Whether a tensor that this thread creates now would be managed.

    The thread's innermost scope decides; without a scope, the process-wide switch.
    """
    return _C.is_enabled()


def switch_scope(name: str, on: bool, *allocator: _C.Allocator | None) -> ReentrantScope:
    """A scope of the thread that enters it, in which new tensors are managed or are not.

    Args:
        name: as messages show it.
        allocator: () keeps that of the scope around it; (None,): the process's own.
    """

    def begin() -> _C.Scope:
        if on:
            check_runtime(name)
            install.for_managed_tensors()
            budgets.request_default()
        return _C.Scope(on, *allocator)

    return ReentrantScope(name, begin, _end)


def _end(scope: _C.Scope) -> None:
    scope.close()
    if not _C.is_enabled():
        _C.flush_all_pending()


@exact_keywords
def enabled() -> ReentrantScope:
    """A scope in which new tensors on the accelerator are managed.

    A context manager and a decorator, which can be entered again while it is open. It holds for the thread
    that enters it and for the threads that run its backward, not for other threads. It takes no options:
    limit, budget and `moves` belong to the process, and are what `enable` set.

    >>> with torch_uvm.enabled():
    ...     x = torch.ones(4, device=torch.accelerator.current_accelerator())
    >>> @torch_uvm.enabled()
    ... def step(): ...
    """
    return switch_scope("torch_uvm.enabled()", True)


@exact_keywords
def disabled() -> ReentrantScope:
    """A scope in which new tensors get ordinary memory; otherwise like `enabled`."""
    return switch_scope("torch_uvm.disabled()", False)
