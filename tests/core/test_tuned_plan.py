"""TunedPlan: the kernel that serves an M, and its regret."""

from __future__ import annotations

import pytest

from gemmtune.core.tuned_plan import PlanInterval, PlanKernel, TunedPlan

KERNELS = (
    PlanKernel({}, "a", 8, None, True, {1: 1.0, 32: 2.0, 64: 5.0}),
    PlanKernel({}, "b", 64, None, True, {32: 1.9, 64: 4.0}),
    PlanKernel({}, "c", 64, "p", True, {32: 0.5, 64: 1.0}),
)
PLAN = TunedPlan(
    "key", {}, "target", 4, 64,
    {"": (PlanInterval(4, 32, "a"), PlanInterval(33, 33, "b"), PlanInterval(34, 64, "a")),
     "p": (PlanInterval(4, 64, "c"),)},
    KERNELS,
)  # fmt: skip


@pytest.mark.parametrize(("m", "packing", "name"), [
    (3, "", None), (4, "", "a"), (32, "", "a"), (33, "", "b"), (34, "", "a"), (64, "", "a"), (65, "", None),
    (4, "p", "c"), (64, "p", "c"), (65, "p", None), (8, "q", None),
])  # fmt: skip
def test_serving_kernel_of_an_m(m: int, packing: str, name: str | None) -> None:
    kernel = PLAN.serving(m, packing)
    assert (None if kernel is None else kernel.id) == name


@pytest.mark.parametrize(("m", "packing", "regret"), [
    (32, "", 2.0 / 1.9 - 1.0), (64, "", 0.25), (32, "p", 0.0), (40, "", None), (1, "", None), (32, "q", None),
])  # fmt: skip
def test_regret_compares_the_kernels_of_a_layout(m: int, packing: str, regret: float | None) -> None:
    assert PLAN.regret(m, packing) == (None if regret is None else pytest.approx(regret))


def test_kernels_are_found_by_id() -> None:
    assert PLAN.find("b") == KERNELS[1]
    assert PLAN.find("d") is None
