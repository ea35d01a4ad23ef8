"""The one place that talks to HiGHS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import highspy
import numpy as np
from highspy._core import _Highs

from timelyfreeze.errors import PlanError, problem
from timelyfreeze.planner.lp import SparseLp, Statuses
from timelyfreeze.planner.model import Floats

# The simplex runs in slices, between which it can be told to stop and from which it goes on where it was. HiGHS's own
# interrupt needs a Python callback, and so the GIL, at every pivot.
_SLICE_S = 0.5
_DEVEX = 1  # dual edge weights: exact ones cost a solve a row when the basis is not all slacks
_PRIMAL, _DUAL = 4, 1
_STATUS = (highspy.HighsBasisStatus.kLower, highspy.HighsBasisStatus.kBasic, highspy.HighsBasisStatus.kUpper)

Basis = Any  # highspy.HighsBasis; opaque outside this file


class StoppedError(Exception):
    """The caller asked to stop; there is no solution."""


class HighsSolver:
    """One HiGHS instance: a program, solved again and again as its costs and bounds change. Not thread-safe."""

    def __init__(self, *, time_limit_s: float) -> None:
        # The base class: highspy.Highs prints a banner as it is made, and calls back into Python at every pivot.
        self._highs: Any = _Highs()
        self._highs.setOptionValue("output_flag", False)
        self._highs.setOptionValue("parallel", "off")
        self._highs.setOptionValue("simplex_dual_edge_weight_strategy", _DEVEX)
        self._time_limit_s = time_limit_s
        self.is_stopped: Callable[[], bool] = lambda: False  # asked between two slices

    def load(self, lp: SparseLp, start: Statuses | Basis) -> None:
        """Take a new program, to be solved from a start: statuses of (columns, rows), or what ``basis()`` gave."""
        _pass(self._highs, lp)
        basis = start
        if isinstance(start, tuple):
            basis = highspy.HighsBasis()
            basis.col_status, basis.row_status = ([_STATUS[code] for code in codes.tolist()] for codes in start)
            basis.valid = True
        self._highs.setBasis(basis)  # a start that does not fit is only slower: HiGHS then takes its own

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
        self._highs.setOptionValue("simplex_strategy", _PRIMAL if from_feasible else _DUAL)
        status = self._run()
        if status not in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kTimeLimit):
            # A basis can turn out singular or stall; HiGHS's own start with presolve does not depend on it.
            self._highs.clearSolver()
            self._highs.setOptionValue("simplex_strategy", _DUAL)
            status = self._run()
        if status != highspy.HighsModelStatus.kOptimal:
            text = self._highs.modelStatusToString(status)
            raise PlanError(problem("the linear program was not solved", expected="an optimum", got=text))
        return np.array(self._highs.getSolution().col_value)

    def basis(self) -> Basis:
        """Where the last solve ended, to start a similar program from."""
        return self._highs.getBasis()

    def _run(self) -> highspy.HighsModelStatus:
        begin = self._highs.getRunTime()
        while True:
            if self.is_stopped():
                raise StoppedError
            now = self._highs.getRunTime()
            left = self._time_limit_s - (now - begin)
            if left <= 0:
                return highspy.HighsModelStatus.kTimeLimit
            self._highs.setOptionValue("time_limit", now + min(_SLICE_S, left))
            self._highs.run()
            status: highspy.HighsModelStatus = self._highs.getModelStatus()
            if status != highspy.HighsModelStatus.kTimeLimit:
                return status


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
