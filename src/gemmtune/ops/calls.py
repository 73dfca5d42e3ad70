"""Calls of a model on its example inputs, in any of the forms that users may pass these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def as_calls(example_inputs: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return (args, kwargs) for each call that the example inputs describe.

    A Tensor is the argument of one call, a tuple the arguments of one call, and a dict the keyword arguments of one
    call. A list has several calls, each a Tensor, a tuple or a dict. Raises TypeError for anything else, and ValueError
    for an empty list.
    """
    if isinstance(example_inputs, list):
        if not example_inputs:
            raise ValueError("example_inputs is empty: give the arguments of at least one call")
        return [_as_call(item) for item in example_inputs]
    return [_as_call(example_inputs)]


def _as_call(item: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(item, Tensor):
        return (item,), {}
    if isinstance(item, tuple):
        return item, {}
    if isinstance(item, Mapping):
        return (), dict(item)
    raise TypeError(
        "example_inputs must be a Tensor, a tuple of arguments, a dict of keyword arguments, or a list of these; "
        f"got {type(item).__name__}"
    )


def run(model: Callable[..., Any], example_inputs: Any) -> None:
    """Call the model once per example, without gradients."""
    for call in calls_of(model, example_inputs):
        call()


def calls_of(model: Callable[..., Any], example_inputs: Any) -> list[Callable[[], None]]:
    """Return one function for each example; it calls the model once on that example, without gradients."""

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None]:
        def call() -> None:
            with torch.no_grad():
                model(*args, **kwargs)

        return call

    return [bind(args, kwargs) for args, kwargs in as_calls(example_inputs)]
