"""The limits of managed memory, and of the pinned host memory that a budget writes to."""

from __future__ import annotations

from torch_uvm import _C
from torch_uvm._util.arguments import exact_keywords, limit_bytes
from torch_uvm._util.log import log


@exact_keywords
def set_limit(limit: int | str | None) -> None:
    """Bounds the managed memory that the process may reserve, over all homes.

    The limit is checked before the runtime is asked and cannot be overrun by any path; an allocation
    past it raises `torch.OutOfMemoryError`. A limit below what is reserved now takes nothing away, it
    only refuses more. The option `limit` of TORCH_UVM_CONF and `enable(limit=...)` set the same figure.

    Args:
        limit: bytes, or a string such as "4GiB" (KiB, MiB, GiB, TiB, or KB, MB, GB, TB in powers of
            ten); None for no figure, which still means at most what the host has available.

    Raises:
        TypeError: `limit` is of another type.
        ValueError: it is negative or does not parse.

    >>> torch_uvm.set_limit("4GiB")
    """
    _C.set_limit(limit_bytes(limit))
    log.info("limit of managed memory: %s", "none" if limit is None else limit)


@exact_keywords
def get_limit() -> int | None:
    """The limit of managed memory, over all homes.

    Returns:
        bytes, or None without a figure.

    >>> torch_uvm.set_limit("4GiB")
    >>> torch_uvm.get_limit()
    4294967296
    """
    return _C.get_limit()


@exact_keywords
def set_host_limit(limit: int | str | None) -> None:
    """Bounds the pinned host memory that tensors off their device may have, of the process.

    At the limit no tensor can leave its device, so that a budget may raise `torch.OutOfMemoryError`. A
    limit below what is pinned now gives unused pinned memory back to the system. Memory in use stays, and
    blocks that become free in it are used again. The option `host_limit` of TORCH_UVM_CONF and
    `enable(host_limit=...)` set the same figure.

    Args:
        limit: bytes, or a string such as "64GiB" (units as `set_limit` has them); None for no figure,
            which still means at most what the host has available.

    Raises:
        TypeError: `limit` is of another type.
        ValueError: it is negative or does not parse.

    >>> torch_uvm.set_host_limit("64GiB")
    """
    count = limit_bytes(limit, "host_limit")
    _C.set_option("host_limit", "none" if count is None else str(count))
    log.info("limit of pinned host memory: %s", "none" if limit is None else limit)


@exact_keywords
def get_host_limit() -> int | None:
    """The limit of pinned host memory for tensors off their device.

    Returns:
        bytes, or None without a figure. `residency_stats()["host_bytes"]` is what is pinned now.

    >>> torch_uvm.set_host_limit("64GiB")
    >>> torch_uvm.get_host_limit()
    68719476736
    """
    value = next(option["value"] for option in _C.describe_options() if option["key"] == "host_limit")
    return None if value == "none" else _C.parse_bytes(value)
