"""Simulated times of kernels over M."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from gemmtune.core.tuned_plan import PlanInterval
from gemmtune.tuning import kernel_choice
from gemmtune.tuning.curves import Curves

BOUND = 0.05
MOST = 10  # kernels of a plan
LAST = 512
PLAIN = "plain"
SIZES = (1, 3, 8, 17, 32, 65, 128, 257, 512)

Model = Callable[[int], float]


def staircase(base: float, step: float, rows: int = 1) -> Model:
    """Return the time of a kernel that takes ``step`` for each row of tiles, which have ``rows`` rows."""
    return lambda m: base + step * -(-m // rows)


def sample_curves(
    models: Mapping[str, Model],
    sizes: Sequence[int] = SIZES,
    *,
    plain: str = "",
    steps: Mapping[str, int] = {},
    counts: Mapping[int, int] = {},
) -> Curves:
    times = {name: {m: model(m) for m in sizes} for name, model in models.items()}
    return Curves(sizes[0], sizes[-1], times, plain, steps, counts)


def serve(curves: Curves) -> dict[int, str]:
    return kernel_choice.serving(curves, kernel_choice.choose_kernels(curves, BOUND, MOST), BOUND)


def serving_at(found: Sequence[PlanInterval], m: int) -> str:
    (name,) = (interval.kernel for interval in found if interval.first <= m <= interval.last)
    return name


def assert_cover(found: Sequence[PlanInterval], first: int, last: int) -> None:
    """Assert that intervals ascend from ``first`` to ``last`` without gaps, and that each is another kernel's than the
    one before."""
    assert [interval.first for interval in found] == [first, *(interval.last + 1 for interval in found[:-1])]
    assert found[-1].last == last
    assert all(interval.first <= interval.last for interval in found)
    assert all(a.kernel != b.kernel for a, b in itertools.pairwise(found))


@st.composite
def simulated_curves(draw: st.DrawFn) -> Curves:
    """Draw curves of up to six kernels, some with steps, with or without ATen's plain op, at some M."""
    seconds = st.floats(0.5, 20.0)
    models = {
        f"k{index}": (staircase(draw(seconds), draw(st.floats(0.0, 0.5)) * rows, rows), rows)
        for index, rows in enumerate(draw(st.lists(st.sampled_from((1, 8, 16, 64, 128)), min_size=1, max_size=6)))
    }
    if draw(st.booleans()):
        models[PLAIN] = staircase(draw(seconds), draw(st.floats(0.0, 0.5))), 1
    sizes = sorted({1, LAST, *draw(st.lists(st.integers(1, LAST), max_size=40))})
    counts = draw(st.dictionaries(st.integers(1, LAST), st.integers(1, 1000), max_size=3))
    return sample_curves(
        {name: model for name, (model, _) in models.items()}, sizes, plain=PLAIN if PLAIN in models else "",
        steps={name: rows for name, (_, rows) in models.items() if name != PLAIN}, counts=counts,
    )  # fmt: skip


def waves(tile: int) -> Model:
    """Return the time of a kernel that computes four tiles of ``tile`` rows at a time."""
    return lambda m: (4.0 + tile) * -(-m // (4 * tile))


def wave_curves(
    rows: Mapping[str, int], sizes: Sequence[int], *, plain: Model | None = None, scale: float = 1.0
) -> Curves:
    """Return the curves of kernels that compute four tiles at a time. Their times are ``scale`` times the estimates."""
    estimates = {name: waves(tile) for name, tile in rows.items()}
    times = {name: lambda m, model=model: scale * model(m) for name, model in estimates.items()}
    models: dict[str, Model] = times | ({} if plain is None else {PLAIN: plain})
    curves = sample_curves(models, sizes, plain="" if plain is None else PLAIN, steps=rows)
    return replace(curves, waves=True, estimated_s=lambda name, m: estimates[name](m) if name in estimates else None)
