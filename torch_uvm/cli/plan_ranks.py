"""Plans of the ranks of torchrun: rank 0 collects them through the store of torchrun's agent."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

_PREFIX = "torch_uvm plan "
_PATIENCE = timedelta(hours=1)  # the ranks plan at the same time, and one may take longer


def rank() -> int | None:
    """This process's rank under torchrun; None: it is alone."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    return int(os.environ["RANK"])


def collect(mine: int, record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Passes a plan on. Returns those of all ranks in rank 0, and None in the others.

    Raises:
        RuntimeError: a rank ended without a plan.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_PATIENCE
    )
    store.set(f"{_PREFIX}{mine}", json.dumps(record))
    if mine != 0:
        store.wait([f"{_PREFIX}read"])  # the agent ends its store with the last rank
        return None
    found = [json.loads(store.get(f"{_PREFIX}{each}")) for each in range(int(os.environ["WORLD_SIZE"]))]
    store.set(f"{_PREFIX}read", "yes")
    return found
