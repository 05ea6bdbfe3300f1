"""What a dry run needs to know of a card: rates, latencies, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Card:
    """A GPU, and the host that feeds it. Rates are a second's, as data sheets give them (dense).

    An operator takes ``max(FLOPs / (rate * efficiency), bytes / (memory_rate * efficiency)) + launch_us``
    on the device, and at least ``host_us``, which the host needs to queue it.

    Args:
        name: such as "h200".
        memory_bytes: of the device.
        flops: FLOP/s of dense matrix products by dtype: "float64", "float32", "tf32", "bfloat16",
            "float16", "float8". A dtype that is missing is taken as float32. "tf32" is used for what PyTorch
            computes in TF32: convolutions of float32, and products after `set_float32_matmul_precision`.
        memory_rate: bytes/s of the device's memory.
        launch_us: the least time of a kernel on the device.
        host_us: the least time that the host needs to run an eager operator.
        into, out, in_place: bytes/s of the link: copies to the device, copies to the host, and kernels
            that use host memory.
        both: bytes/s in all while copies go both ways; None: ``into`` and ``out`` together.
        in_place_written: bytes/s each way of kernels that read host memory and write to it; None: as
            ``in_place``.
        efficiency: the part of a rate that is reached, by "matmul", "convolution", "attention", "memory";
            missing: 1.
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    memory_rate: float
    launch_us: float
    host_us: float
    into: float
    out: float
    in_place: float
    efficiency: Mapping[str, float] = field(default_factory=dict)
    both: float | None = None
    in_place_written: float | None = None
