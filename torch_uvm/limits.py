"""The limit of managed memory."""

from __future__ import annotations

from torch_uvm import _C
from torch_uvm.arguments import exact_keywords, limit_bytes
from torch_uvm.notes import log


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
