"""A linear programme that is built row by row, and solved by scipy's HiGHS."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

Term: TypeAlias = tuple[int, float]  #: a variable and its factor
Terms: TypeAlias = list[Term]


class LinearProgramme:
    """Variables, and rows `sum <= limit`."""

    def __init__(self) -> None:
        self.most: list[float | None] = []
        self.entries: tuple[list[int], list[int], list[float]] = ([], [], [])
        self.limits: list[float] = []

    def variable(self, most: float | None = None) -> int:
        self.most.append(most)
        return len(self.most) - 1

    def row(self, terms: Sequence[Term], limit: float) -> None:
        for variable, factor in terms:
            self.entries[0].append(len(self.limits))
            self.entries[1].append(variable)
            self.entries[2].append(factor)
        self.limits.append(limit)

    def minimise(self, terms: Iterable[Term]) -> np.ndarray[Any, Any]:
        """The values of the variables at which the sum of the terms is least."""
        rows, columns, factors = self.entries
        matrix = coo_array((factors, (rows, columns)), shape=(len(self.limits), len(self.most))).tocsr()
        cost = np.zeros(len(self.most))
        for variable, factor in terms:
            cost[variable] += factor
        bounds = [(0, most) for most in self.most]
        # On 40 000 variables interior points take 7 s, the simplex method 130.
        solved = linprog(cost, A_ub=matrix, b_ub=self.limits, bounds=bounds, method="highs-ipm")
        if solved.status == 2:
            raise ValueError("the operands and results of an operator alone exceed the budget")
        if solved.status != 0:
            raise RuntimeError(f"the linear programme was not solved: {solved.message}")
        return np.asarray(solved.x)
