"""The modules of gemmtune that a call enters when the dispatch cache does not serve it, and how often."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import gemmtune
from gemmtune import fuse
from gemmtune.dispatch import RUNTIME, cache
from gemmtune.ops.table import OPS
from gemmtune.store import MemoryStore
from helpers.serving import evidence, register, store_decision, toy

MOST_ENTRIES = 2
UNCOUNTED = ("gemmtune.core.", "gemmtune.backends.")  # values and predicates; kernels and their arithmetic

Entries = dict[str, list[str]]  # by module, the names of its functions that were called from other modules

X, WEIGHT, BIAS = torch.randn(8, 16), torch.randn(16, 16), torch.randn(16)
PARAMETER = torch.nn.Parameter(WEIGHT)
CALLS: dict[str, Callable[[], Tensor]] = {
    "linear": lambda: gemmtune.linear(X, WEIGHT),
    "linear with a bias": lambda: gemmtune.linear(X, WEIGHT, BIAS),
    "linear with a bias and an epilogue": lambda: gemmtune.linear(X, WEIGHT, BIAS, epilogue=[fuse.relu(), fuse.add(X)]),
    "linear with a gradient": lambda: gemmtune.linear(X, PARAMETER, BIAS),
    "linear of [2, 4, K] with a bias": lambda: gemmtune.linear(X.view(2, 4, 16), WEIGHT, BIAS),
    "mm": lambda: gemmtune.mm(X, WEIGHT.t()),
}


def entries_of_miss(call: Callable[[], object], *, tuned: bool, described: bool = False) -> Entries:
    """Return the entries of a call that misses the cache.

    tuned: whether a kernel serves it; otherwise PyTorch does. described: whether a call was described before that
    differs in M only, and another was served by that description. The store was read and the kernel loaded before,
    since only the first miss of a process does that.
    """
    store = MemoryStore()
    RUNTIME.refresh(store)
    if tuned:
        register()
        with gemmtune.record() as recording:
            call()
        ((problem, _),) = recording.problems
        store_decision(store, problem, evidence(toy(), 0.1), chosen=toy())
    call()
    if described:
        cache.DISPATCH_CACHE.clear()
        call()
        cache.DISPATCH_CACHE.clear()
    else:
        cache.clear()
    return entries(call)


def entries(call: Callable[[], object]) -> Entries:
    """Return the entries of a call: the calls of functions of one gemmtune module from functions of another.

    Constructors that ``dataclass`` generates are left out, and the definitions of generated functions. A generator is
    entered once.
    """
    found: Entries = defaultdict(list)
    generators: list[FrameType] = []

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        module = _module(frame)
        if event != "call" or module is None:
            return
        if frame.f_code.co_filename == "<string>" or frame.f_code.co_name == "<module>":
            return
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            if frame in generators:
                return
            generators.append(frame)
        caller = _caller(frame)
        if caller not in (None, module):
            found[module].append(getattr(frame.f_code, "co_qualname", frame.f_code.co_name))

    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(None)
    return dict(found)


def _caller(frame: FrameType) -> str | None:
    """Return the gemmtune module that a frame was called from, also through functions of other packages."""
    back = frame.f_back
    while back is not None and _module(back) is None:
        back = back.f_back
    return None if back is None else _module(back)


def _module(frame: FrameType) -> str | None:
    """Return the gemmtune module of a frame's function; that of a generated function is the one that generated it."""
    if frame.f_code.co_filename.startswith("<gemmtune "):
        name = frame.f_code.co_name
        return f"gemmtune.ops.{name}" if name in OPS else "gemmtune.dispatch.specialize"
    name = frame.f_globals.get("__name__", "")
    return name if name.partition(".")[0] == "gemmtune" else None


def is_counted(module: str) -> bool:
    """Whether the number of a module's entries is bounded."""
    return not f"{module}.".startswith(UNCOUNTED)


def most_entries(found: Entries) -> int:
    """Return the largest number of entries of a module that counts."""
    return max(len(names) for module, names in found.items() if is_counted(module))
