"""Composite functions of PyTorch: those in Python that hide the functions that they call from modes and subclasses."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

from torch.nn import functional

_COMPOSITES = (functional.multi_head_attention_forward,)


def is_composite(func: Callable[..., Any]) -> bool:
    """Whether ``func`` is one of PyTorch's functions in Python that multiply by weights which are their arguments."""
    return func in _COMPOSITES


def without_override(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of ``func`` that does not check for overrides, so that modes and subclasses see the functions that
    it calls.

    PyTorch passes the whole function to an override, which can only run it with overrides off.
    """
    original = cast(FunctionType, func)
    names = {**original.__globals__, "has_torch_function": lambda _: False}
    copy = FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy
