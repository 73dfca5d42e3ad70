"""Models whose problems have stored decisions in which the toy kernels win."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

import gemmtune
from gemmtune.core.problem import Problem
from gemmtune.store import MemoryStore

from .serving import evidence, register, store_decision, toy


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def store_toy_decisions(store: MemoryStore, problems: Iterable[tuple[Problem, int]], layout: str = "plain") -> None:
    """Store decisions in which the toy kernel wins each problem that has a constant weight."""
    for problem, _ in problems:
        if problem.b.constant:
            store_decision(store, problem, evidence(toy(layout), 0.1), chosen=toy(layout))


def prepare_model(model: nn.Module, x: Any, store: MemoryStore) -> nn.Module:
    """Return the frozen model, and store decisions for the problems of ``model(x)`` in which the toy kernels win."""
    register()
    model.eval().requires_grad_(False)
    with gemmtune.record() as recording:
        model(x)
    store_toy_decisions(store, recording.problems)
    return model
