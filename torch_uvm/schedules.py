"""The schedule that the residency engine follows in a loop: made from a trace, and predicted.

A schedule has the operators of one iteration, and each transfer with the operator that triggers it.
``docs/plan.md`` describes it.

>>> from torch_uvm import schedules, traces
>>> trace = traces.read_trace("run.trace")  # doctest: +SKIP
>>> schedule = schedules.schedule_of(trace, budget=4 << 30)  # doctest: +SKIP
>>> schedules.predict(schedule).step_ms  # doctest: +SKIP
"""

from __future__ import annotations

from torch_uvm._tools.link_lanes import LinkRates
from torch_uvm._tools.predictions import Prediction, Span, predict
from torch_uvm._tools.schedules import Operator, Schedule, Transfer, Use, Value, schedule_of

__all__ = [
    "LinkRates",
    "Operator",
    "Prediction",
    "Schedule",
    "Span",
    "Transfer",
    "Use",
    "Value",
    "predict",
    "schedule_of",
]
