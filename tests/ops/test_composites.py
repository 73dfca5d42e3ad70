"""Composite functions of PyTorch, and copies of them whose inner calls modes can see."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import gemmtune
from gemmtune.ops.composites import is_composite, without_override


class Seen(TorchFunctionMode):
    """A mode that notes the functions that reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def attention_arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``F.multi_head_attention_forward`` for 3 tokens of 8 features, in 2 heads."""
    layer = nn.MultiheadAttention(8, 2)
    x = torch.randn(3, 1, 8)
    args = (x, x, x, 8, 2, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0)
    return (*args, layer.out_proj.weight, layer.out_proj.bias), {"need_weights": False}


def test_attention_is_composite_and_a_linear_is_not() -> None:
    assert is_composite(F.multi_head_attention_forward) is True
    assert is_composite(F.linear) is False


def test_modes_see_the_functions_that_the_copy_calls() -> None:
    args, kwargs = attention_arguments()
    expected, _ = F.multi_head_attention_forward(*args, **kwargs)
    with Seen() as whole:
        F.multi_head_attention_forward(*args, **kwargs)
    with Seen() as seen:
        result, weights = without_override(F.multi_head_attention_forward)(*args, **kwargs)
    torch.testing.assert_close(result, expected)
    assert weights is None
    assert F.linear not in whole.functions
    assert F.linear in seen.functions


def test_products_inside_attention_are_recorded() -> None:
    args, kwargs = attention_arguments()
    with gemmtune.record() as recording:
        F.multi_head_attention_forward(*args, **kwargs)
    assert [(problem.n, problem.k) for problem, _ in recording.problems if problem.family == "mm"] == [(24, 8), (8, 8)]
