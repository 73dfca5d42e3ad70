"""Calls to functions in packages above dispatch, whose modules are imported at the first call."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def late_bound(module: str, name: str) -> Callable[..., Any]:
    """Return a function that calls ``name`` of ``module`` and imports the module when it is first called.

    Serving must load neither the tuner nor what verifies kernels before they are needed.
    """

    def call(*args: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args)

    return call
