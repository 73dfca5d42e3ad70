"""The dispatch cache: the prepared function that serves operands like those of a call.

A key says little of a call: its op, the shape of its first operand, the number of threads. The entries of a key, newest
first, differ in dtype, strides, device and whether a gradient is wanted; each has a guard that says whether it serves
given operands. ``DISPATCH_CACHE`` maps a key to a tuple of entries that is replaced as a whole, so that readers need no
lock; writers hold ``Runtime``'s.

``DESCRIBED_CALLS`` maps a key without the sizes that depend on M to the calls from whose descriptions calls with other
M are served (``another_m``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from ..core.memory import is_subclass
from ..core.torch_compat import forward_ad, profiler
from ..core.torch_compat import len_torch_dispatch_stack as _dispatch_modes
from .guards import Guard, make_guard
from .profiling import run_profiled

# A guard, and the function that serves the operands of which the guard is true.
GuardedEntry = tuple[Guard, Callable[..., Any]]
_Entry = TypeVar("_Entry")


class DescribedEntry(NamedTuple):
    """An entry of ``DESCRIBED_CALLS``, for a ``another_m.DescribedCall``.

    key: of ``DESCRIBED_CALLS``. guard: takes any M. function_for: from operands of which the guard is true to the
    function that serves them; returns None where they have to be described. is_exact: whether the guard, under a key
    of ``DISPATCH_CACHE``, is true of operands of one M only.
    """

    key: Any
    guard: Guard
    function_for: Callable[..., Any]
    is_exact: bool


DISPATCH_CACHE: dict[Any, tuple[GuardedEntry, ...]] = {}
DESCRIBED_CALLS: dict[Any, tuple[DescribedEntry, ...]] = {}
MAX_KEYS = 8192
MAX_ENTRIES = 8  # of one key, tried one after the other
MAX_STRIDES = 1024  # of one key with more entries than that

_entries_of = DISPATCH_CACHE.get


class EntriesByStrides(tuple[GuardedEntry, ...]):
    """The entries of a key that has had more than ``MAX_ENTRIES``: an empty tuple, with a few entries for each result
    of ``strides_key`` in ``by_strides``.

    When the oldest of eight entries was dropped instead, a loop over nine layouts prepared an entry in every call
    (36 us).
    """

    def __init__(self) -> None:
        self.by_strides: dict[Any, tuple[GuardedEntry, ...]] = {}


def lookup(key: Any, args: tuple[Any, ...], guarded: tuple[Any, ...]) -> Tensor | None:
    """Return the result of a call by a cached entry, or None when no entry serves it. Every call pays for this.

    key: a tuple: the shape of the first operand and other sizes that may depend on M, then the op's name, then what
    does not depend on M. args: the operands in the order of launches, then the epilogue's tensors and ``out``. guarded:
    the tensors among them (a PackedWeight's key is part of ``key``).
    """
    try:
        entries = _entries_of(key)
    except TypeError:  # the key cannot be hashed: symbolic sizes, arguments of a wrong type
        return None
    if entries is not None and not _dispatch_modes() and forward_ad._current_level < 0:
        for guard, function in entries:
            if guard(*guarded):
                if profiler._is_profiler_enabled:
                    return run_profiled(key, function, args)
                return function(*args)  # type: ignore[no-any-return]
        if not entries:
            for guard, function in entries.by_strides.get(strides_key(guarded), ()):  # type: ignore[attr-defined]
                if guard(*guarded):
                    if profiler._is_profiler_enabled:
                        return run_profiled(key, function, args)
                    return function(*args)  # type: ignore[no-any-return]
    return None


def is_reachable() -> bool:
    """Whether ``lookup`` looks into the cache at all: no dispatch mode and no forward-mode level is active."""
    return not _dispatch_modes() and forward_ad._current_level < 0


def insert(
    key: Any, function: Callable[..., Any], guarded: tuple[Any, ...], described: DescribedEntry | None = None,
    guard: Guard | None = None,
) -> None:  # fmt: skip
    """Add an entry whose function serves operands like ``guarded`` in a state of PyTorch like this one, and a described
    call, unless ``lookup`` could not find the entry. The oldest entry of a full key, and the oldest key of a full
    cache, are dropped.

    guard: one of a described call that ``lookup`` may use for this key; None has one made.
    """
    if guard is None:
        if key is None or not is_reachable() or any(map(is_subclass, guarded)):
            return
        guard = make_guard(*guarded)
        if not guard(*guarded):
            return
    try:
        entries = DISPATCH_CACHE.get(key)
    except TypeError:  # as in lookup
        return
    if entries is not None and len(entries) == MAX_ENTRIES:
        entries = DISPATCH_CACHE[key] = EntriesByStrides()
    if isinstance(entries, EntriesByStrides):
        shape = strides_key(guarded)
        _prepend(entries.by_strides, shape, entries.by_strides.get(shape, ()), (guard, function), MAX_STRIDES)
    else:
        _prepend(DISPATCH_CACHE, key, entries or (), (guard, function), MAX_KEYS)
    if described is not None:
        others = DESCRIBED_CALLS.get(described.key, ())
        _prepend(DESCRIBED_CALLS, described.key, others, described, MAX_KEYS)


def clear() -> None:
    """Forget all entries and described calls."""
    DISPATCH_CACHE.clear()
    DESCRIBED_CALLS.clear()


def _prepend(
    table: dict[Any, tuple[_Entry, ...]], key: Any, entries: tuple[_Entry, ...], entry: _Entry, limit: int
) -> None:
    """Add an entry in front of those that the table has for a key; the oldest key makes room for a new one."""
    while not entries and len(table) >= limit:
        del table[next(iter(table))]
    table[key] = (entry, *entries[: MAX_ENTRIES - 1])


def strides_key(guarded: tuple[Any, ...]) -> Any:
    """Return what tells a call from most others of its key: the operands' strides, and the device and dtype of the
    first. None when one is not a tensor."""
    try:
        first = guarded[0]
        return (first.dtype, first.device, *[tensor.stride() for tensor in guarded])
    except (AttributeError, RuntimeError):
        return None
