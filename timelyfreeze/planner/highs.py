"""The one place that talks to HiGHS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import highspy
import numpy as np
from highspy._core import _Highs

from timelyfreeze.errors import PlanError, problem
from timelyfreeze.planner.lp import SparseLp
from timelyfreeze.planner.model import Floats

# The simplex runs in slices, between which it can be told to stop and from which it goes on where it was. HiGHS's own
# interrupt needs a Python callback, and so the GIL, at every pivot. Slices of pivots, not of time: the same input goes
# the same way. So many take up to 0.7 s on the largest programs.
_SLICE_PIVOTS = 2000
_NO_SLICES = 2**31 - 1
# Where no vertex is known to start from, programs with more rows than this go to the interior point first: 1F1B 32 x
# 128 with transfers, 14,944 rows, takes 3.7 to 6.3 s, all solves together; by the simplex alone 5.7 to 13.7 s.
_MOST_SIMPLEX_ROWS = 10_000
# Rows and bounds hold this exactly, in units of the longest time. With HiGHS's own 1e-7 ratios passed their limits by
# 7e-7 in random cases where 1e-7 of the longest action is much for others.
TOLERANCE = 1e-9
_DUAL, _PRIMAL = 1, 4
_OPTIONS: dict[str, bool | int | float | str] = {
    "output_flag": False,
    "parallel": "off",
    "solver": "simplex",
    "simplex_strategy": _DUAL,
    "simplex_iteration_limit": _SLICE_PIVOTS,
    "presolve": "off",  # ``build_lp`` does what would help, and a slice of the presolved program could not be resumed
    "simplex_dual_edge_weight_strategy": 1,  # Devex: exact weights cost a solve a row when the basis is not all slacks
    # HiGHS's random changes of costs, against ties, are in proportion to the largest cost, which is the makespan's; the
    # prices of ratios are 1e-4 beside it and break most ties themselves. At 1, 32 x 128 needs up to twice the pivots.
    "dual_simplex_cost_perturbation_multiplier": 0.1,
    "primal_feasibility_tolerance": TOLERANCE,
}

Basis = Any  # highspy.HighsBasis; opaque outside this file


class StoppedError(Exception):
    """The caller asked to stop; there is no solution."""


class HighsSolver:
    """One HiGHS instance: a program, solved again and again as its costs and bounds change. Not thread-safe.

    Args:
        time_limit_s: for every solve.
    """

    def __init__(self, *, time_limit_s: float) -> None:
        # The base class: highspy.Highs prints a banner as it is made, and calls back into Python at every pivot.
        self._highs: Any = _Highs()
        self._highs.setOptionValue("output_flag", False)
        self._time_limit_s = time_limit_s
        self._method = "simplex"  # of the next solve
        self.is_stopped: Callable[[], bool] = lambda: False  # asked between two slices

    def load(self, lp: SparseLp, start: Basis | None = None) -> None:
        """Take a new program, to be solved from what ``basis()`` gave for a similar one, or from nothing."""
        _pass(self._highs, lp)
        # A start that does not fit is refused; HiGHS then begins with every row slack, which is dual feasible here.
        is_taken = start is not None and self._highs.setBasis(start) == highspy.HighsStatus.kOk
        self._method = "ipx" if not is_taken and len(lp.row_lower) > _MOST_SIMPLEX_ROWS else "simplex"

    def set_costs(self, cost: Floats) -> None:
        """Minimise another sum of the columns."""
        self._highs.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost)

    def set_upper(self, column: int, upper: float) -> None:
        """Bound one column by [0, upper]."""
        self._highs.changeColBounds(column, 0.0, upper)

    def minimize(self, *, from_feasible: bool = False) -> Floats:
        """Solve from where the last solve ended and return the columns.

        Args:
            from_feasible: only costs have changed, so the last solution still obeys all rows (primal simplex).

        Raises:
            PlanError: no optimum, and why.
            StoppedError: ``is_stopped`` said so between two slices.
        """
        status = self._run(solver=self._method, simplex_strategy=_PRIMAL if from_feasible else _DUAL)
        self._method = "simplex"  # there is a vertex now: the interior point ends at one as well
        if status not in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kTimeLimit):
            # A basis can turn out singular or stall; HiGHS's own start with presolve does not depend on it.
            self._highs.clearSolver()
            status = self._run(presolve="on", simplex_iteration_limit=_NO_SLICES)
        if status != highspy.HighsModelStatus.kOptimal:
            text = self._highs.modelStatusToString(status)
            raise PlanError(problem("the linear program was not solved", expected="an optimum", got=text))
        return np.array(self._highs.getSolution().col_value)

    def basis(self) -> Basis:
        """Where the last solve ended, to start a similar program from."""
        return self._highs.getBasis()

    def _run(self, **options: bool | int | float | str) -> highspy.HighsModelStatus:
        """Solve, slice by slice, with some options other than usual."""
        ends_s = self._highs.getRunTime() + self._time_limit_s  # HiGHS counts from its making, not from each run
        for name, value in (_OPTIONS | options | {"time_limit": ends_s}).items():
            self._highs.setOptionValue(name, value)
        while not self.is_stopped():
            self._highs.run()
            status: highspy.HighsModelStatus = self._highs.getModelStatus()
            if status != highspy.HighsModelStatus.kIterationLimit:
                return status
            self._highs.setOptionValue("solver", "simplex")  # goes on where an interior point's slice ended as well
        raise StoppedError


def relaxed_optimum(lp: SparseLp, time_limit_s: float) -> float | None:
    """The optimum of a large program to 1e-6, without its solution; None if there was not the time. Is not stopped.

    The interior point takes 0.9 s where the simplex takes more than 60: the relaxation over cuts of 16 x 64 with 5 %
    scatter.
    """
    highs: Any = _Highs()
    for name, value in (("output_flag", False), ("parallel", "off"), ("solver", "ipx"), ("run_crossover", "off")):
        highs.setOptionValue(name, value)
    highs.setOptionValue("time_limit", time_limit_s)
    _pass(highs, lp)
    highs.run()
    is_found = highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return float(highs.getInfo().objective_function_value) if is_found else None


def _pass(highs: Any, lp: SparseLp) -> None:
    """Give HiGHS a program."""
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(lp.cost), len(lp.row_lower)
    model.col_cost_, model.col_lower_, model.col_upper_ = lp.cost, lp.col_lower, lp.col_upper
    model.row_lower_, model.row_upper_ = lp.row_lower, lp.row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = lp.starts, lp.index, lp.value
    if highs.passModel(model) == highspy.HighsStatus.kError:
        raise PlanError(problem("HiGHS refused the linear program", hint="Check the costs for extreme values."))
