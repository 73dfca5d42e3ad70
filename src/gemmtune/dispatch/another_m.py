"""The first call with another M.

Most of the time of a first call goes into describing it, finding its Plan and checking its tensors, which gives the
same for every M. A ``DescribedCall`` keeps that: a call that differs from the described one in M only needs no more
than the function that serves the Plan's interval of its M, and an allocation of its output.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

from torch import Tensor

from ..backends.base import Kernel
from ..core import devices
from ..core.call import Call
from ..core.errors import KernelError, UnsupportedError
from ..core.problem import FAMILIES, Problem
from ..core.torch_compat import forward_ad, profiler
from ..core.torch_compat import len_torch_dispatch_stack as dispatch_modes
from . import cache
from .fallback import run_fallback
from .forms import Forms
from .guards import exact_guard, make_guard_of_any_size
from .plan_kernels import PlanKernels
from .profiling import run_profiled
from .runtime import RUNTIME
from .specialize import FunctionalFn, FunctionOfM, TorchFunction, raw_reader, specialize, specialize_any_m


class DescribedCall:
    """A served call for which an op's ``describe`` made a Call, without its tensors: it serves calls with other M.

    args: the call's operands, the epilogue's tensors and, where ``has_out``, out; the raw form of a PackedWeight where
    that serves. kernels: those of the Plan that served the call; None where PyTorch serves all M. torch_function,
    needs_grad: as for ``specialize``. raw: the attribute of the PackedWeight that has its raw form; empty where the
    args are the caller's. forms: which form of a weight that is kept in two serves each M; None for other weights.
    """

    def __init__(
        self, call: Call, args: Sequence[Any], kernels: PlanKernels | None, torch_function: TorchFunction | None,
        *, needs_grad: bool, has_out: bool, raw: str, forms: Forms | None,
    ) -> None:  # fmt: skip
        self._problem, self._is_packed, self._adapt_b = call.problem, call.packed is not None, call.adapt_b
        self._kernels, self._torch_function, self._needs_grad = kernels, torch_function, needs_grad
        self._has_out, self._raw, self._forms, self._columns = has_out, raw, forms, call.shape[-1]
        self._kind, self._read_raw = devices.get(args[0].device.type), raw_reader(raw, len(args)) if raw else None
        # What serves as a function of M, by the interval of the Plan; and by the kernel (None: PyTorch's function) and
        # its ``overlap``, where it is None if more than M is needed.
        self._of_intervals: dict[int, FunctionOfM] = {}
        self._functions: dict[Any, FunctionOfM | None] = {}
        self._firsts, self._lasts = ([], []) if kernels is None else (kernels.firsts, kernels.lasts)
        self._aux = range(len(args) - has_out - len(call.aux), len(args) - has_out)
        axes = [step.axis for step in call.problem.epilogue if step.takes_tensor]
        # For each of the args: how many of its first dimensions depend on M.
        self.varying = [0] * len(args)
        self.varying[0] = args[0].dim() - 1
        for position, axis in zip(self._aux, axes, strict=True):
            if axis in ("row", "full"):
                self.varying[position] = max(args[position].dim() - 1, 1)
        if has_out:
            self.varying[-1] = args[-1].dim() - 1
        # The positions of the args that depend on M, and the elements that a row of them has.
        self._rows = [(i, args[i].numel() // call.problem.m) for i, count in enumerate(self.varying) if count]
        self._shapes = [
            (self.varying[position], tuple(tensor.shape))
            for position, tensor in zip(self._aux, call.aux, strict=True)
        ]  # fmt: skip
        # With one row, a tensor [1, N] or [1] may have another axis than with several.
        is_clear = all(axis == "col" for axis in axes) and all(args[i].dim() == 1 for i in self._aux)
        self._least_m = 1 if is_clear else 2

    @staticmethod
    def is_possible(call: Call, args: Sequence[Any]) -> bool:
        """Whether what served the call may serve other M: its sizes tell which of its tensors depend on M, and these
        are dense. Of a family that was added, it is not known what else may depend on M."""
        problem, a = call.problem, args[0]
        if problem.family not in FAMILIES or problem.is_batched or problem.is_empty or problem.m == 1:
            return False
        if not a.is_contiguous() or not devices.is_served(a.device):
            return False
        is_matrix = call.a.shape == (problem.m, problem.k) and call.a.data_ptr() == a.data_ptr()
        return is_matrix and call.shape[:-1] == a.shape[:-1]

    def function_for(self, args: Sequence[Any]) -> FunctionalFn | None:
        """Return the function that serves operands like args, of which the guard is true; None where they have to be
        described.

        The first call with an M waits for this, and a function of Python that has not run for a while takes 2 us
        beside an H200: so what most calls need is in this one (``benchmarks/new_m.py``).
        """
        a, has_out = args[0], self._has_out
        m = a.numel() // self._problem.k
        if m < self._least_m or (has_out and args[-1].shape[:-1] != a.shape[:-1]):
            return None
        for position, size in self._rows:  # the tensors that depend on M have its sizes, and are dense
            tensor = args[position]
            if tensor.numel() != m * size or not tensor.is_contiguous():
                return None
        if self._forms is not None and self._forms.is_raw(m) != bool(self._raw):
            return None
        interval = bisect_right(self._firsts, m) - 1
        if interval >= 0 and m > self._lasts[interval]:
            interval = -1
        function = self._of_intervals.get(interval)
        run = function(m, (*a.shape[:-1], self._columns)) if function is not None else self._prepare(m, interval, args)
        return run if self._read_raw is None or run is None else self._read_raw(run)

    def _prepare(self, m: int, interval: int, args: Sequence[Any]) -> FunctionalFn | None:
        """Return the function that serves M by the Plan, and remember what serves its interval; None where the call has
        to be described. interval: the number of the Plan's interval in which M is; -1 for none."""
        a, kernels = args[0], self._kernels
        loaded = kernel = None if kernels is None else kernels.loaded(m)
        if kernel is None:
            if self._kind.is_capturing(a.device):
                return None
            kernel = None if kernels is None else RUNTIME.kernel_of_size(kernels, m)
            if kernel is None and self._is_packed:
                return None
        if self._raw:
            args = (a, getattr(args[1], self._raw), *args[2:])
        function = None if self._has_out else self._function_of_m(m, args, kernel)
        if function is None:
            return self._specialized(m, args, kernel)
        if interval >= 0 and kernels is not None and (loaded is not None or kernels.is_plain(interval)):
            self._of_intervals[interval] = function
        return function(m, (*a.shape[:-1], self._columns))

    def _function_of_m(self, m: int, args: Sequence[Any], kernel: Kernel | None) -> FunctionOfM | None:
        """Return what serves by a kernel, as a function of M; None where it needs more than M."""
        key = kernel, kernel is not None and kernel.overlap
        if key not in self._functions:
            self._functions[key] = self._specialized_any_m(m, args, kernel)
        return self._functions[key]

    def _specialized_any_m(self, m: int, args: Sequence[Any], kernel: Kernel | None) -> FunctionOfM | None:
        """Return what ``_functions`` has for a kernel. args: have this M."""
        torch_function, plain, backward = self._torch_function, self._run_plainly, None
        if torch_function is not None and not self._is_packed:
            plain, backward = torch_function.functional, torch_function.backward
        if kernel is None:
            return None if torch_function is None else lambda m, shape: plain
        try:
            function = specialize_any_m(self._call(m, args, self._problem), args, kernel, plain)
        except (KernelError, UnsupportedError):  # the kernel does not take this M
            return None
        if function is None or backward is None or not self._needs_grad:
            return function
        return lambda m, shape: partial(backward, function(m, shape))

    def _run_plainly(self, *args: Any) -> Tensor:
        """Compute by plain PyTorch, which is specialised in every call: for calls of which few go here."""
        m = int(args[0].numel() // self._problem.k)
        return run_fallback(self._call(m, args, self._problem.with_m(m)))

    def _specialized(self, m: int, args: Sequence[Any], kernel: Kernel | None) -> FunctionalFn:
        """Return what ``specialize`` does."""
        is_composed = kernel is None and self._torch_function is None
        call = self._call(m, args, self._problem.with_m(m) if is_composed else self._problem)
        operands = args[:-1] if self._has_out else args
        return specialize(
            call, operands, kernel, self._torch_function, needs_grad=self._needs_grad, has_out=self._has_out
        )

    def _call(self, m: int, args: Sequence[Any], problem: Problem) -> Call:
        """Return what the op would describe. problem: that of the described call will do, where ``specialize`` needs no
        other: one with another M takes 5 us to make."""
        a = args[0]
        flatten = None if a.dim() == 2 else methodcaller("reshape", m, self._problem.k)
        b = args[1] if self._adapt_b is None else self._adapt_b(*args[1 : self._aux.start])
        aux = tuple([
            args[position].view((m, *shape[1:]) if varying else shape)
            for position, (varying, shape) in zip(self._aux, self._shapes, strict=True)
        ])  # fmt: skip
        return Call(
            problem, a if flatten is None else flatten(a), b, aux,
            (*a.shape[:-1], self._columns), flatten, self._adapt_b,
        )  # fmt: skip


def described_entry(
    key: Any, call: Call, args: tuple[Any, ...], guarded: Sequence[Tensor], kernels: PlanKernels | None,
    torch_function: TorchFunction | None, *, needs_grad: bool, out: Tensor | None, raw: str, forms: Forms | None,
    sized: Collection[int] = (),
) -> cache.DescribedEntry | None:  # fmt: skip
    """Return what serves calls that differ from this one in M only; None where they have to be described.

    key: of ``DESCRIBED_CALLS``; None where there is none. args: without out. guarded: the tensors among the caller's
    args, and out. sized: the positions of the args whose number of elements is in keys of ``DISPATCH_CACHE``. The other
    arguments are as for ``DescribedCall``.
    """
    has_out = out is not None
    if key is None or (kernels is None and call.packed is not None) or not DescribedCall.is_possible(call, args):
        return None
    if len(set(map(id, guarded))) < len(guarded):  # a tensor is passed twice
        return None
    described = DescribedCall(
        call, (*args, out) if has_out else args, kernels, torch_function, needs_grad=needs_grad, has_out=has_out,
        raw=raw, forms=forms,
    )  # fmt: skip
    varying = described.varying
    if len(guarded) < len(varying):  # a PackedWeight is not guarded
        varying = [varying[0], *varying[2:]]
    guard = make_guard_of_any_size(guarded, varying)
    if guard is None:
        return None
    # The dispatch cache's keys have the shape of a. A tensor of which one dimension may differ has all its strides
    # checked by the guard, and that dimension follows from its number of elements.
    others = [count == 0 or (count == 1 and i in sized) for i, count in enumerate(described.varying) if i > 0]
    is_exact = described.varying[0] == 1 and all(others)
    return cache.DescribedEntry(key, guard, described.function_for, is_exact)


def serve_another_m(sizes: int, key: Any, args: tuple[Any, ...], guarded: tuple[Any, ...]) -> Tensor | None:
    """Return the result of a call that differs from a described one in M only; None where there is no such call.

    sizes: how many parts of the key may depend on M. key, args, guarded: as for ``cache.lookup``. The function that
    serves the call is added to the dispatch cache.
    """
    if key is None or dispatch_modes() or forward_ad._current_level >= 0:  # as in lookup
        return None
    generation = RUNTIME.generation
    try:
        entries = cache.DESCRIBED_CALLS.get(key[sizes:])
    except TypeError:  # as in lookup
        return None
    for described in entries or ():
        if described.guard(*guarded):
            function = described.function_for(args)
            if function is not None:
                guard = described.guard if described.is_exact else exact_guard(*guarded)
                RUNTIME.cache_entry(key, function, guarded, generation, guard=guard)
                if profiler._is_profiler_enabled:
                    return run_profiled(key, function, args)
                return function(*args)  # type: ignore[no-any-return]
    return None
