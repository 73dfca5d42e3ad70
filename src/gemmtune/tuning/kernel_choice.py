"""Which kernels a plan has, and which of them serves each measured M."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .curves import Curves, point_weights

MEAN_REGRET = 0.007  # kernels are added while the weighted mean regret is above this, and falls by _WORTH
_WORTH = 0.002
_BEYOND = 3.0  # what exceeds the bound adds this multiple of itself to the regret
_EXCESS = 1e3  # the cost of a regret above the bound, at an M of any weight
_SWITCH = 0.004  # the regret, at an M of average weight, that a change of kernels between two M must save
_UNSERVED = 10.0  # the regret at an M without any kernel


def choose_kernels(curves: Curves, bound: float, most: int) -> list[str]:
    """Return the fewest kernels with which no measured M has a regret above ``bound``, found greedily, with exchanges;
    more where they lower the mean regret, up to ``most``, ATen's plain op not counted. That is always among them where
    it can serve."""
    choice = _Choice(curves, bound)
    chosen = [curves.plain] if curves.plain else []
    free = len(chosen)
    score = choice.score(chosen)
    while len(chosen) < min(most + free, len(curves.times)):
        best, name = choice.best_addition(chosen)
        is_enough = score.excess <= 0.0 and (score.cost <= MEAN_REGRET or score.cost - best.cost < _WORTH)
        if best.cost >= score.cost or is_enough:
            break
        chosen.append(name)
        chosen, score = choice.exchange(chosen, best)
    return choice.without_useless(chosen, score)


class _Score(NamedTuple):
    """How well a set of kernels serves.

    cost: the weighted mean of the regrets, to which what exceeds the bound adds ``_BEYOND`` times itself. excess: by
    how much the largest regret exceeds the bound; 0.0 where none does.
    """

    cost: float
    excess: float


class _Losses(NamedTuple):
    """What kernels lose at each measured M, of which the least counts.

    costs: the M's share of ``_Score.cost``. excess: as for ``_Score``, at this M.
    """

    costs: list[float]
    excess: list[float]


class _Choice:
    """Scores of sets of kernels. An M without any kernel counts as a regret of ``_UNSERVED``."""

    def __init__(self, curves: Curves, bound: float) -> None:
        self._curves, self._plain, self._bound = curves, curves.plain, bound
        self._weights = point_weights(curves)
        self._is_served = {m: curves.best(m) < math.inf for m in self._weights}
        self._total = sum(self._weights.values()) or 1.0
        self._losses = {
            name: self._losses_of({m: min(curves.regret(name, m), _UNSERVED) for m in self._weights})
            for name in curves.times
        }
        self._no_kernel = self._losses_of(dict.fromkeys(self._weights, _UNSERVED))

    def _losses_of(self, regrets: Mapping[int, float]) -> _Losses:
        """Return the losses of a kernel with these regrets, by M."""
        excess = [
            self._curves.excess(regret, m, self._bound) if self._is_served[m] else 0.0 for m, regret in regrets.items()
        ]
        shares = (self._weights[m] / self._total for m in regrets)
        costs = [
            share * (regret + _BEYOND * beyond)
            for share, regret, beyond in zip(shares, regrets.values(), excess, strict=True)
        ]
        return _Losses(costs, excess)

    def score(self, chosen: Sequence[str]) -> _Score:
        return _score(self._least(chosen), self._no_kernel)

    def best_addition(self, chosen: Sequence[str]) -> tuple[_Score, str]:
        """Return the best score of ``chosen`` with one kernel more, and this kernel."""
        least = self._least(chosen)
        others = ((name, losses) for name, losses in self._losses.items() if name not in chosen)
        return min((_score(least, losses), name) for name, losses in others)

    def exchange(self, chosen: list[str], score: _Score) -> tuple[list[str], _Score]:
        """Return the kernels and their score after all exchanges of one kernel for another that lower it."""
        for name in chosen:
            if name == self._plain:
                continue
            rest = [other for other in chosen if other != name]
            best, other = self.best_addition(rest)
            if best < score:
                return self.exchange([*rest, other], best)
        return chosen, score

    def without_useless(self, chosen: list[str], score: _Score) -> list[str]:
        """Return ``chosen`` without the kernels that others, chosen later, made needless."""
        for name in chosen:
            if name == self._plain:
                continue
            rest = [other for other in chosen if other != name]
            without = self.score(rest)
            if without.excess <= max(score.excess, 0.0) and without.cost <= max(MEAN_REGRET, score.cost + _WORTH):
                return self.without_useless(rest, without)
        return chosen

    def _least(self, chosen: Sequence[str]) -> _Losses:
        """Return the least losses of some kernels at each M."""
        least = self._no_kernel
        for name in chosen:
            losses = self._losses[name]
            least = _Losses([*map(min, least.costs, losses.costs)], [*map(min, least.excess, losses.excess)])
        return least


def _score(left: _Losses, right: _Losses) -> _Score:
    """Return the score of the lesser losses of two at each M. Costs grow with the regret, as the excess does."""
    return _Score(sum(map(min, left.costs, right.costs)), max(map(min, left.excess, right.excess), default=0.0))


def serving(curves: Curves, chosen: Sequence[str], bound: float) -> dict[int, str]:
    """Return the kernel that serves each measured M: the least regret, with few changes from M to M. It is above
    ``bound`` only where that of all chosen kernels is."""
    weights = point_weights(curves)
    sizes, mean = curves.sizes, sum(weights.values()) / max(len(weights), 1)
    costs: dict[str, float] = dict.fromkeys(chosen, 0.0)
    back: list[dict[str, str]] = []
    for m in sizes:
        before = min(costs, key=lambda name: costs[name])
        step, origin = {}, {}
        regrets = {name: curves.regret(name, m) for name in chosen}
        least = min(regrets.values())
        for name in chosen:
            stay = costs[name] <= costs[before] + _SWITCH * mean
            origin[name] = name if stay else before
            is_beyond = regrets[name] > least and curves.excess(regrets[name], m, bound) > 0.0
            regret = weights[m] * min(regrets[name], 10.0) + (_EXCESS if is_beyond else 0.0)
            step[name] = (costs[name] if stay else costs[before] + _SWITCH * mean) + regret
        costs = step
        back.append(origin)
    name = min(costs, key=lambda item: costs[item])
    result: dict[int, str] = {}
    for m, origin in zip(reversed(sizes), reversed(back), strict=True):
        result[m] = name
        name = origin[name]
    return dict(sorted(result.items()))
