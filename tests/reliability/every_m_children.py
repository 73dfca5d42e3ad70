"""A small weight that is tuned for ranges of M, in this process and in others, and products that stores serve."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

import gemmtune
from gemmtune.core.tuned_plan import TunedPlan
from gemmtune.core.workloads import linear_problem
from gemmtune.dispatch import RUNTIME, current_target
from gemmtune.store import SqliteStore
from gemmtune.store.base import Store
from gemmtune.store.legality import review
from helpers.undisturbed import undisturbed

PROBLEM = linear_problem(16, 96, 160, "float32")
_ATTEMPTS = 4  # races of a few milliseconds may all be undecided, and then only ATen's kernels serve


def stored_plan(store: Store) -> TunedPlan | None:
    return store.get_plan(current_target(), PROBLEM.plan_key)


def tune_range(store: Store, first: int, last: int) -> None:
    """Tune PROBLEM's weight for a range of M until the store has a plan that covers it."""
    for _ in range(_ATTEMPTS):
        gemmtune.tune([PROBLEM.with_m(first)], m=range(first, last + 1), budget=0.3, store=store, backends=["native"])
        plan = stored_plan(store)
        if plan is not None and plan.first <= first and last <= plan.last:
            return


def tune_range_when_told(path: str, first: int, last: int) -> None:
    """Tune a range after a line on standard input, and print the range of the plan that the store then has."""
    store = SqliteStore(path)
    print("ready", flush=True)
    sys.stdin.readline()
    with undisturbed():
        tune_range(store, first, last)
        plan = stored_plan(store)
    print(json.dumps(None if plan is None else [plan.first, plan.last]))


def report_faults(path: str, first: int, last: int) -> None:
    """Print what is wrong with the store, as ``faults_of_plan`` has it."""
    with undisturbed():
        print(json.dumps(faults_of_plan(SqliteStore(path), first, last)))


def small_integers(*shape: int) -> Tensor:
    """Return random integers as float32: sums of their products are exact in every order."""
    return torch.randint(-8, 9, shape).float()


def faults_of_serving(weight: Tensor, layouts: Iterable[str], sizes: Iterable[int]) -> list[str]:
    """Serve products of a weight [N, K], raw and packed in some layouts, at some M. Return what is not right."""
    weights = {"raw": weight} | {layout: gemmtune.pack(weight, layout=layout) for layout in layouts}
    wrong = []
    for m in sizes:
        x = small_integers(m, weight.shape[1])
        for name, form in weights.items():
            try:
                if not torch.equal(gemmtune.linear(x, form), F.linear(x, weight)):
                    wrong.append(f"{name}: wrong at M = {m}")
            except Exception as error:  # nothing that a store lacks may reach a caller
                wrong.append(f"{name}: {type(error).__name__} at M = {m}: {error}")
    return wrong


def faults_of_plan(store: Store, first: int, last: int) -> list[str]:
    """Return what is wrong with the stored plan of PROBLEM's weight, which must cover a range, with the store, and with
    products that they serve at every M up to a few beyond the range."""
    plan = stored_plan(store)
    if plan is None:
        return ["there is no plan"]
    wrong = [] if plan.first <= first and last <= plan.last else [f"the plan covers {plan.first} to {plan.last}"]
    wrong += review(current_target(), plan).illegal + store.verify()
    RUNTIME.refresh(store)
    layouts = [layout for layout in plan.intervals if layout]
    return wrong + faults_of_serving(small_integers(PROBLEM.n, PROBLEM.k), layouts, range(1, last + 9))
