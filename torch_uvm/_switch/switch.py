"""The switch: whether new tensors on the accelerator get managed memory."""

from __future__ import annotations

from types import EllipsisType

from torch_uvm import _C
from torch_uvm._patches import deferred_updates, install, tensor_to
from torch_uvm._residency import budget as budgets
from torch_uvm._residency.limits import get_host_limit
from torch_uvm._util.arguments import exact_keywords, limit_bytes, show
from torch_uvm._util.log import log
from torch_uvm._util.runtime import check_runtime

_MOVES = '"copy" or "alias"'


def _check_moves(moves: object) -> None:
    if not isinstance(moves, str):
        raise TypeError(f"moves is {show(moves)}; accepted: {_MOVES}")
    if moves not in ("copy", "alias"):
        raise ValueError(f"moves={moves!r}; accepted: {_MOVES}")


def _check_host_tensors(host_tensors: object) -> None:
    if not isinstance(host_tensors, bool):
        raise TypeError(f"host_tensors is {show(host_tensors)}; accepted: True, False")


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

    May be called at any time; tensors made before stay what they are. A scope that is open on the
    calling thread (`enabled`, `disabled`) goes on to say what holds inside it. Each call says anew what
    `moves` and `host_tensors` are.

    Args:
        budget: the device-resident bytes that managed tensors may have on each device, as `set_budget`
            takes it: bytes, "20GiB", "80%", "auto", or None for the driver's own residency. Left out
            (`...`): what was asked for before, here or in TORCH_UVM_CONF, and "auto" if nothing was.
        limit: the most managed bytes the process may reserve, as `set_limit` takes it. None leaves
            the limit as it is, so that one set before, or by TORCH_UVM_CONF, is not lost;
            `set_limit(None)` takes it away.
        host_limit: the most pinned host memory for tensors off their device, as `set_host_limit` takes
            it. None leaves it as it is; `set_host_limit(None)` takes it away.
        moves: what plain `.to`, `.cpu()`, `.cuda()` and `Module.to` do with managed tensors while the
            switch is on. "copy": new memory, as in PyTorch. "alias": where only the device changes they
            move, as `torch_uvm.to` does, and the result shares the bytes; `copy=True` copies still. A
            program that takes `.cpu()` for a snapshot then sees it change.
        host_tensors: whether CPU tensors of at least 1 MiB are managed, too, so that moving them to the
            accelerator copies nothing.
        optimizer: when a step of torch.optim's Adam, AdamW, SGD and others updates large parameters that
            have a budget. "in_place": at once. "deferred": each at its next use, so that its transfers
            overlap what is computed before; whoever looks at a parameter, its gradient or its state finds
            the bits of a step at once (docs/residency.md). Left out (`...`): what was asked for before,
            here or in TORCH_UVM_CONF, and "in_place" if nothing was.

    Raises:
        TypeError, ValueError: a keyword or value that is not accepted. Nothing has changed.
        RuntimeError: there is no runtime for this machine's accelerator.

    >>> torch_uvm.enable(limit="4GiB")
    """
    asked = None if budget is ... else budgets.budget_text(budget)
    _check_moves(moves)
    _check_host_tensors(host_tensors)
    asked_optimizer = deferred_updates.chosen() if isinstance(optimizer, EllipsisType) else optimizer
    deferred_updates.check(asked_optimizer)
    figure = limit_bytes(limit)
    host_figure = limit_bytes(host_limit, "host_limit")
    check_runtime("enable()", now=host_tensors)
    install.for_managed_tensors()
    if figure is not None:
        _C.set_limit(figure)
    if host_figure is not None:
        _C.set_option("host_limit", str(host_figure))
    if asked is None:
        budgets.request_default()
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

    Managed tensors stay managed, and usable, until they are freed. The limit stays. Updates that an
    optimizer has deferred are run.
    """
    _C.set_enabled(False)
    _C.flush_all_pending()
    log.info("off: new tensors are not managed")
