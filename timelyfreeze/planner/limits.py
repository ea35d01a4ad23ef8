"""What a plan may give up: the options as arrays over a schedule's stages and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from timelyfreeze.planner.live import starved_places, top_stage, uneven_places
from timelyfreeze.planner.model import Bools, CostModel, Floats, Ints
from timelyfreeze.planner.options import ParameterLimits, PlanOptions

_ROUNDING = 1e-9  # of sums of ratios
_APART = 1e-6  # so far a place stays from 0, which would say that it cannot be frozen, and from 1, which is a cut


@dataclass(frozen=True)
class Limits:
    """Bounds on the ratios ``[num_stages, num_microbatches]`` of a plan.

    Attributes:
        sums: the largest sum of every stage's ratios, ``[num_stages]``.
        most: the largest ratio of every place that trains something; 0 where nothing can be frozen.
        may_be_whole: which stages may train nothing in a micro-batch, ``[num_stages]``.
        live: in how many micro-batches every parameter of a stage has to be live, ``[num_stages]``.
        prices: of a stage's freeze ratio, ``[num_stages]``.
        is_exact: in which stages the number of micro-batches that are to be live is set for every parameter. There
            masks above the cut leave out what the cut stage's masks, which grow from the bottom up, keep; so all of
            those micro-batches count. ``[num_stages]``.
    """

    sums: Floats
    most: Floats
    may_be_whole: Bools
    live: Floats
    prices: Floats
    is_exact: Bools

    @classmethod
    def of_options(cls, model: CostModel, options: PlanOptions) -> Limits:
        """The limits that options set.

        Raises:
            ValueError: an option is about a stage that is not there, or more micro-batches are to be live than a step
                has.
        """
        caps = np.array(options.caps(model.num_stages, model.num_microbatches))
        most: Floats = np.where(model.freezable, 1.0, 0.0)
        top = top_stage(model)
        if top >= 0:
            most[top] *= 1.0 - options.min_live_ratio
        may_be_whole: Bools = np.any(most >= 1.0, axis=1)
        if options.live_microbatches is None:
            live = options.floor_ratio * (1.0 - caps) * model.num_microbatches
        else:
            live = np.full(model.num_stages, float(options.live_microbatches))
        prices = np.ones(model.num_stages)
        for stage, price in (options.weights or {}).items():
            prices[stage] = price
        sums = caps * model.freezable.sum(axis=1)
        is_exact = np.full(model.num_stages, options.live_microbatches is not None)
        for stage, limits in (options.parameter_limits or {}).items():
            is_exact[stage] = True
            prices[stage] = limits.price
            live[stage] = (1.0 - limits.least) * model.num_microbatches
            most[stage] = np.minimum(most[stage], _most_above_cut(limits, model.num_microbatches))
            if stage == model.base:  # every micro-batch that freezes something there freezes its bottom
                sums[stage] = min(sums[stage], model.num_microbatches - live[stage])
        return cls(sums, most, may_be_whole, live, prices, is_exact)

    @property
    def most_full(self) -> Ints:
        """In how many micro-batches every stage may train nothing."""
        room = np.minimum(self.sums, self.most.shape[1] - self.live)
        return np.where(self.may_be_whole, np.floor(room + _ROUNDING), 0).astype(np.intp)

    @property
    def most_or_whole(self) -> Floats:
        """The largest ratio of every place, whether or not it trains something."""
        whole = (self.most > 0) & (self.most_full > 0)[:, None]
        return np.where(whole, 1.0, self.most)

    @property
    def relative_prices(self) -> Floats:
        """Prices where the dearest is 1: only their proportions count, and solvers fail on numbers such as 1e12."""
        relative: Floats = self.prices / (self.prices.max() or 1.0)
        return relative

    def freezing(self, ratios: Floats) -> Floats:
        """The price of sets of ratios ``[..., num_stages, num_microbatches]``, by relative prices."""
        price: Floats = (ratios.sum(axis=-1) * self.relative_prices).sum(axis=-1)
        return price

    def starved(self, model: CostModel, ratios: Floats) -> Bools:
        """Where to unfreeze so that every parameter is live as often as it has to be, bool of the shape of ``ratios``.

        Where there is such a place, the ratios without it have to be asked about again.
        """
        places = starved_places(model, ratios, self.live, is_exact=self.is_exact)
        if self.is_even and not places.any():
            places = uneven_places(model, ratios, self.live)
        return places

    @property
    def is_even(self) -> bool:
        """Whether all parameters of every stage are to be live equally often."""
        return bool((self.is_exact & (self.sums <= self.most.shape[1] - self.live + _ROUNDING)).all())

    def trim(self, ratios: Floats) -> Floats:
        """Take off what passes a stage's sum by the solver's tolerance; from ratios that are not 1: those make cuts."""
        partly = np.where(ratios < 1.0, ratios, 0.0)
        total = partly.sum(axis=1)
        over = np.clip(ratios.sum(axis=1) - self.sums, 0.0, total)
        trimmed: Floats = ratios - partly * (over / np.where(total > 0, total, 1.0))[:, None]
        return trimmed

    def allow(self, ratios: Floats) -> bool:
        """Whether ratios ``[num_stages, num_microbatches]`` are within the limits on single places and on sums."""
        if ratios.shape != self.most.shape:
            return False
        within = (ratios <= self.most_or_whole + _ROUNDING).all()
        return bool(within and (ratios.sum(axis=1) <= self.sums + _ROUNDING).all())


def _most_above_cut(limits: ParameterLimits, num_microbatches: int) -> float:
    """The largest ratio, above a cut, that masks can meet without passing a parameter's cap.

    Ratios r_m can be met by parameters with shares w_p that are frozen in at most n_p micro-batches if, for every j,
    the j largest sum to no more than sum_p w_p min(j, n_p) (Gale, 1957). The right side is concave in j, so it suffices
    that no r_m passes its slope up to the largest n_p: mean n / largest n. Micro-batches whose bottom is frozen, as
    many as the smallest cap allows, are taken off all n_p before.

    >>> round(_most_above_cut(ParameterLimits(0.0, 0.45, 0.5, 1.0), 8), 9)  # a tenth of the work is never frozen
    0.9
    """
    num_whole = np.floor(limits.least * num_microbatches + _ROUNDING)
    mean, most = (cap * num_microbatches - num_whole for cap in (limits.mean, limits.most))
    return float(np.clip(mean / most, _APART, 1.0 - _APART)) if limits.least < limits.most else 1.0
