"""The limits of managed memory, and of the pinned host memory that evicted tensors use."""

from __future__ import annotations

from torch_uvm import _C
from torch_uvm._residency import budget
from torch_uvm._util.arguments import exact_keywords, is_word, limit_bytes
from torch_uvm._util.log import log


@exact_keywords
def set_limit(limit: int | str | None) -> None:
    """Limits the managed memory that the process may reserve, over all homes.

    The limit is checked before each call of the runtime, on every path. An allocation that would exceed it
    raises `torch.OutOfMemoryError`. Budgets are at most the limit: those in force follow it, so that what a
    lower limit excludes is evicted. What no budget covers is not freed; further allocations are refused. The
    option `limit` of TORCH_UVM_CONF and `enable(limit=...)` set the same value.

    Args:
        limit: bytes, or a string such as "4GiB" (KiB, MiB, GiB, TiB, or KB, MB, GB, TB in powers of ten).
            None or "none": no number; at most what the host has available can be reserved.

    Warns:
        UserWarning: a budget was larger, so that less of it is in force (`get_budget`).

    Raises:
        TypeError: `limit` is of another type.
        ValueError: it is negative or does not parse.

    >>> torch_uvm.set_limit("4GiB")
    """
    _C.set_limit(limit_bytes(limit))
    budget.warn_of_budgets()
    log.info("limit of managed memory: %s", "none" if limit is None else limit)


@exact_keywords
def get_limit() -> int | None:
    """The limit of managed memory, over all homes.

    Returns:
        bytes, or None without a limit.

    >>> torch_uvm.set_limit("4GiB")
    >>> torch_uvm.memory.get_limit()
    4294967296
    """
    return _C.get_limit()


@exact_keywords
def set_host_limit(limit: int | str | None) -> None:
    """Limits the pinned host memory that the process may use for tensors off their device.

    At the limit no further tensor can be evicted, so that an operator under a budget may raise
    `torch.OutOfMemoryError`. A limit below what is pinned now returns unused pinned memory to the system.

    Args:
        limit: bytes, or a string such as "64GiB" (units as in `set_limit`). "auto", the default: what the
            host has available when a budget takes effect, within the process's control group, less a reserve
            that keeps the machine usable (docs/options.md). None or "none": no number; at most what the host
            has available can be pinned.

    Raises:
        TypeError: `limit` is of another type.
        ValueError: it is negative or does not parse.

    >>> torch_uvm.set_host_limit("64GiB")
    """
    _C.set_option("host_limit", host_limit_text(limit))
    log.info("limit of pinned host memory: %s", "none" if limit is None else limit)


def host_limit_text(limit: int | str | None) -> str:
    """A limit of pinned host memory as the option table stores it.

    Raises:
        TypeError, ValueError: as `set_host_limit`.
    """
    if is_word(limit, "auto"):
        return "auto"
    count = limit_bytes(limit, "host_limit", also=', "auto"')
    return "none" if count is None else str(count)


@exact_keywords
def get_host_limit() -> int | None:
    """The limit of pinned host memory for tensors off their device that is in force.

    Before the first budget takes effect it is the limit that would take effect now.

    Returns:
        bytes, or None without a limit. `stats()["host_bytes"]` is what is pinned now.

    >>> torch_uvm.set_host_limit("64GiB")
    >>> torch_uvm.memory.get_host_limit()
    68719476736
    """
    return _C.host_limit_in_force()
