"""CallSite: one product of a compiled graph at run time. Code that Inductor generates constructs and calls it.

A graph may be compiled once for all M, so that a CallSite chooses the kernel for each M when it first sees it, from the
decisions of the store, as eager ops do. Where no kernel serves, PyTorch's own functions compute the same product.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..backends.aten.norm import normalize_rows_by_kernel
from ..backends.aten.steps import apply_steps, dtype_of
from ..backends.base import CAPTURE_FACTS, Kernel, Launch
from ..backends.cublaslt.choice import load_chosen_kernels
from ..backends.triton.pointwise import pointwise_of
from ..core import devices
from ..core.call import Call
from ..core.errors import KernelError, PackedWeightError, UnsupportedError
from ..core.problem import Problem
from ..core.weights import PackedWeight, QuantWeight
from ..dispatch.fallback import specialize_fallback
from ..dispatch.plan_kernels import PlanKernels
from ..dispatch.runtime import RUNTIME
from ..dispatch.specialize import LAUNCH_ERRORS, bind_launch, warn_refused, with_device_guard
from ..ops import int4pack
from ..ops.packing import pack
from .costs import layouts_of
from .graph_call import GraphCall
from .weight_forms import GroupedScales, MergedWeights, PackedForms

MAX_SIZES = 4096  # values of M for which a CallSite remembers the function that serves; then it begins anew

# Called with out, a, the weights' operands as the graph has them, and the epilogue's tensors.
Run = Callable[[Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]], None]


class CallSite:
    """A product in a compiled graph.

    text: ``GraphCall.to_json``. inductor_signals: as in ``base.CaptureFacts``, for the graph's kernels. is_dynamic:
    whether sizes of the result are symbolic in the graph. shared: another CallSite of the same weights, whose merged
    and packed forms this one uses. Raises ValueError for a malformed text.
    """

    def __init__(
        self, text: str, inductor_signals: bool = False, is_dynamic: bool = False, shared: CallSite | None = None
    ) -> None:
        self.call = GraphCall.from_json(text)
        self._inductor_signals = inductor_signals and self.call.problem.b.constant
        self._count = self.call.weight_count
        self._split = self._count + self.call.part_count
        self._parts = MergedWeights(movable=False)
        if shared is None:
            self._merged = MergedWeights(movable=self.call.form != "matrix")
            self._scales, self._zero_points = _scales_of(self.call), _scales_of(self.call)
            self._packed = PackedForms()
        else:
            self._merged, self._packed = shared._merged, shared._packed
            self._scales, self._zero_points = shared._scales, shared._zero_points
        self._is_batched, self._plan_key = self.call.problem.is_batched, self.call.problem.plan_key
        self._runs: dict[Any, Run] = {}  # by M, or by batch and M
        # What serves all M: the layouts, the best first, and by layout (None: the raw weight) the kernels of its plan.
        self._layouts: list[str | None] = []
        self._plans: dict[str | None, PlanKernels] = {}
        # What Kernel.bind_any_m returned, by the kernel and its ``overlap``.
        self._launches: dict[tuple[Kernel, bool], Launch | None] = {}
        # What serves the intervals of a plan, by interval, where that needs no more than M to be known.
        self._interval_plan: PlanKernels | None = None
        self._interval_runs: dict[int, Run] = {}
        self._bound_layouts: set[str | None] = set()  # those whose plan's kernels are bound
        self._generation = -1
        simpler = self.call.simpler
        self._simpler = None if simpler is None else CallSite(simpler.to_json(), is_dynamic=is_dynamic, shared=self)
        self._is_dynamic, self._simpler_is_prepared, self._library_is_prepared = is_dynamic, False, False

    def __call__(self, a: Tensor, *operands: Tensor, out: Tensor) -> None:
        """Compute the product into ``out`` [M, N] (batched: [batch, M, N]), a dense tensor.

        a: [M, K], dense unless the Problem names a layout. operands: as ``GraphCall.form`` says, then the epilogue's.
        """
        weights, aux = operands[: self._count], operands[self._split :]
        position = self.call.aux_in_parts
        if position is not None:
            whole = self._parts.get(operands[self._count : self._split])
            aux = (*aux[:position], whole, *aux[position:])
        run = self._run_for(out, a, weights, aux)
        if not self._inductor_signals:
            run(out, a, weights, aux)
            return
        CAPTURE_FACTS.inductor_signals = True
        try:
            run(out, a, weights, aux)
        finally:
            CAPTURE_FACTS.inductor_signals = False

    def _run_for(self, out: Tensor, a: Tensor, weights: Sequence[Tensor], aux: Sequence[Tensor]) -> Run:
        """Return the function that serves the M of ``a``, and its batch, now. aux: the epilogue's tensors, one for each
        step."""
        if self._generation != RUNTIME.generation:
            self._forget_runs()
            self._layouts.clear()
            self._plans.clear()
            self._launches.clear()
            self._bound_layouts.clear()
            self._simpler_is_prepared = False
            self._generation = RUNTIME.generation
        run = self._runs.get(self._size_of(a))
        return run or self._run_of_interval(a, aux) or self._prepare(out, a, weights, aux)

    def _forget_runs(self) -> None:
        """Forget what serves each M, and each interval."""
        self._runs.clear()
        self._interval_runs.clear()
        self._interval_plan = None

    def _run_of_interval(self, a: Tensor, aux: Sequence[Tensor]) -> Run | None:
        """Return what serves the interval of the plan that the M of ``a`` is in, and remember it for this M; None where
        it has served no M of that interval."""
        plan, m = self._interval_plan, a.shape[0]
        if plan is None or not self._is_dense(a, aux):
            return None
        interval = bisect_right(plan.firsts, m) - 1
        run = self._interval_runs.get(interval) if interval >= 0 and m <= plan.lasts[interval] else None
        if run is not None and len(self._runs) < MAX_SIZES:
            self._runs[m] = run
        return run

    def _remember_interval(
        self, layout: str | None, kernel: Kernel | None, a: Tensor, aux: Sequence[Tensor], launch: Launch | None,
        run: Run,
    ) -> None:  # fmt: skip
        """Have ``run``, which serves ``a`` by a kernel of a layout's plan, or by PyTorch, serve all M of the interval
        that the M of ``a`` is in. launch: what it launches; None where it launches nothing itself."""
        plan, m = self._plans.get(layout), a.shape[0]
        if RUNTIME.policy == "on-miss":  # which tunes each M
            return
        is_first = (self._layouts or [None])[0] == layout  # other layouts serve where the first has no kernel
        if plan is None or not is_first or not self._is_dense(a, aux) or self._interval_plan not in (None, plan):
            return
        interval = bisect_right(plan.firsts, m) - 1
        if interval < 0 or m > plan.lasts[interval]:
            return
        if kernel is None:
            serves_all = plan.is_plain(interval)
        else:
            by_m_alone = launch is None or self._launches.get((kernel, kernel.overlap)) is not None
            serves_all = by_m_alone and plan.loaded(m) is kernel
        if serves_all:
            self._interval_plan = plan
            self._interval_runs[interval] = run

    def _size_of(self, a: Tensor) -> Any:
        """Return what the function that serves ``a`` depends on: M, or the batch and M."""
        return a.shape[:2] if self._is_batched else a.shape[0]

    def _problem_of(self, a: Tensor) -> Problem:
        """Return the Problem with the M of ``a``, and its batch."""
        problem = self.call.problem.with_m(a.shape[-2])
        return problem.with_size("batch", a.shape[0]) if self._is_batched else problem

    def _prepare(self, out: Tensor, a: Tensor, weights: Sequence[Tensor], aux: Sequence[Tensor]) -> Run:
        """Return the function that serves this M, and remember it unless CUDA graphs are being captured: what serves
        meanwhile are loaded kernels only."""
        if self.call.problem.k == 0 or not out.numel():
            return self._plain(a, weights, aux)
        if self._simpler is not None and self._serving(a) is not self:
            run = self._run_simpler(self._simpler)
        else:
            run = self._packed_run(a, weights, aux) or self._raw_run(a, weights, aux)
        if not devices.is_capturing(a.device):
            if len(self._runs) >= MAX_SIZES:
                self._runs.clear()
            self._runs[self._size_of(a)] = run
            if self._simpler is not None and self._is_dynamic and not self._simpler_is_prepared:
                self._simpler_is_prepared = True
                self._prepare_simpler(self._simpler, out, a, weights, aux)
            if self._is_dynamic and not self._library_is_prepared:
                self._prepare_library(a, weights)
        return run

    def _serving(self, a: Tensor) -> CallSite:
        """Return the CallSite whose decisions serve ``a``: this one, or a simpler one where the store knows nothing of
        so many rows with the norm, or with the gate."""
        index = RUNTIME.index(a.device)
        site: CallSite | None = self
        while site is not None:
            if index.covers(site._plan_key, a.shape[0]):  # a norm or a gate has no batch
                return site
            site = site._simpler
        return self

    def _prepare_simpler(
        self, simpler: CallSite, out: Tensor, a: Tensor, weights: Sequence[Tensor], aux: Sequence[Tensor]
    ) -> None:
        """Compute the product once by ``simpler`` if that serves more rows than this CallSite: kernels for the norm and
        the gate are compiled, and the weights packed, in the graph's first call."""
        index = RUNTIME.index(a.device)
        plan, own = index.tuned_plan(simpler._plan_key), index.tuned_plan(self._plan_key)
        if plan is not None and plan.last > (0 if own is None else own.last):
            with contextlib.suppress(torch.OutOfMemoryError):  # there may be memory when ``simpler`` serves
                self._run_simpler(simpler)(torch.empty_like(out), a, weights, aux)

    def _prepare_library(self, a: Tensor, weights: Sequence[Tensor]) -> None:
        """Have cuBLAS load the kernels that it chooses for the M that PyTorch's own op serves by the plan. Otherwise
        the first call with such an M waits for it."""
        plan = self._plans.get(None)
        if plan is not None and self.call.problem.is_mm_alone and a.is_cuda:
            self._library_is_prepared = True
            load_chosen_kernels(self.call.problem, plan.plain_sizes(), self._raw(weights))

    def _run_simpler(self, simpler: CallSite) -> Run:
        """Return a function that has ``simpler`` multiply, with a kernel for the norm in front of it, or for the gate
        behind it: kernels of products compute these for few rows only."""
        norm, gate = self.call.problem.norm_steps, self.call.problem.gate
        dtype, columns = self.call.problem.out_dtype, self.call.problem.n
        multiply_halves = None if gate is None else pointwise_of((gate,), dtype, dtype)

        def behind_norm(out: Tensor, a: Tensor, weights: Sequence[Tensor], aux: Sequence[Tensor]) -> None:
            rows, rest = normalize_rows_by_kernel(a, norm, aux[: len(norm)]), aux[len(norm) :]
            simpler._run_for(out, rows, weights, rest)(out, rows, weights, rest)

        def before_gate(out: Tensor, a: Tensor, weights: Sequence[Tensor], aux: Sequence[Tensor]) -> None:
            assert gate is not None
            both = out.new_empty(a.shape[0], columns)
            simpler._run_for(both, a, weights, aux)(both, a, weights, aux)
            if multiply_halves is None or not multiply_halves.run(both, (), out):
                out.copy_(apply_steps(both.float(), (gate,), ()))

        return behind_norm if norm else before_gate

    def _raw(self, weights: Sequence[Tensor]) -> Any:
        """Return b of the weights as they are, merged where there are several. ``int4pack``: the operands."""
        if self.call.form == "int4pack":
            return weights
        if self.call.form == "matrix":
            return weights[0]
        data = self._merged.get(weights[: len(self.call.parts)]).t()
        problem = self.call.problem
        if problem.b.quant is None:
            return data
        return QuantWeight(data, *self._quantization(weights), problem.k, problem.b.quant, problem.b.dtype)

    def _quantization(self, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the scales and the zero points of a weight-only product's operands."""
        parts, quant = len(self.call.parts), self.call.problem.b.quant
        assert quant is not None
        zero_point = self._zero_points.get(weights[2 * parts :]) if quant.zero_point else None
        return self._scales.get(weights[parts : 2 * parts]), zero_point

    def _described(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Call:
        problem = self._problem_of(a)
        return Call(problem, a, b, tuple(aux), problem.out_shape)

    def _kernel(self, packed: PackedWeight | None, a: Tensor) -> Kernel | None:
        """Return the kernel that multiplies ``a`` by a packed weight, or by the raw one (None); None where there is no
        such kernel. Raises PackedWeightError as ``Runtime.choose``."""
        layout = None if packed is None else packed.layout
        plan = None if self._is_batched or RUNTIME.policy == "on-miss" else self._plans.get(layout)
        kernel = None if plan is None else RUNTIME.kernel_of_size(plan, a.shape[0])
        if kernel is not None or (plan is not None and packed is None):
            return kernel
        choice = RUNTIME.choose(self._problem_of(a), packed, a.device)
        if choice.plan is not None:
            self._plans[layout] = choice.plan
        return choice.kernel

    def _bind_plan(self, layout: str | None, a: Tensor, b: Any, aux: Sequence[Tensor]) -> None:
        """Bind the loaded kernels of a layout's plan, once. To bind a kernel first takes milliseconds, for which the
        first call with an M that needs it would wait."""
        plan = None if layout in self._bound_layouts else self._plans.get(layout)
        is_bound_by_m = self._is_dense(a, aux) and isinstance(b, Tensor | PackedWeight)
        if plan is None or not is_bound_by_m or devices.is_capturing(a.device):
            return
        self._bound_layouts.add(layout)
        for size in (*plan.lasts, a.shape[0]):  # that of ``a`` last, since it sets ``Kernel.overlap``
            kernel = plan.loaded(size)
            if kernel is not None and (kernel, kernel.overlap) not in self._launches:
                with contextlib.suppress(KernelError, UnsupportedError):  # warned of when that M is served
                    self._launches[kernel, kernel.overlap] = kernel.bind_any_m(a, b, aux)

    def _is_dense(self, a: Tensor, aux: Sequence[Tensor]) -> bool:
        """Whether M alone tells the launch: all tensors that depend on it are dense. With one row it does not."""
        if self._is_batched or a.shape[0] < 2 or not a.is_contiguous():
            return False
        return not aux or all(tensor.is_contiguous() for tensor in aux)

    def _raw_run(self, a: Tensor, weights: Sequence[Tensor], aux: Sequence[Tensor]) -> Run:
        """Return a function by the kernel that serves the weights as they are, or by PyTorch."""
        if self.call.form == "int4pack":  # only PyTorch's operator reads these weights as they are
            return self._plain(a, weights, aux)
        kernel, raw = self._kernel(None, a), self._raw(weights)
        self._bind_plan(None, a, raw, aux)
        if kernel is None:
            plain = self._plain(a, weights, aux)
            if self.call.problem.is_mm_alone:
                self._remember_interval(None, None, a, aux, None, plain)
            return plain
        launch = self._bound(kernel, a, raw, aux)
        single = not self.call.parts or self.call.form == "linear"
        merged, matrix = self._merged, self.call.form == "matrix"

        def run_launch(out: Tensor, a: Tensor, weights: Sequence[Tensor], aux: Sequence[Tensor]) -> None:
            assert launch is not None
            launch(out, a, weights[0] if matrix else merged.get(weights), *aux)

        launch = launch if single else None
        run: Run = partial(self._run_raw, _unbound(kernel, a.device)) if launch is None else run_launch
        run = self._guarded(kernel, run)
        self._remember_interval(None, kernel, a, aux, launch, run)
        return run

    def _run_raw(
        self, run: Callable[..., None], out: Tensor, a: Tensor, weights: Sequence[Tensor], aux: Sequence[Tensor]
    ) -> None:
        run(a, self._raw(weights), aux, out)

    def _packed_run(self, a: Tensor, weights: Sequence[Tensor], aux: Sequence[Tensor]) -> Run | None:
        """Return a function by a kernel for packed weights; None where the raw weights are served faster, or cannot be
        packed."""
        constant = self.call.problem.b.constant
        if not constant or any(weight.is_inference() for weight in weights) or self._packed.changes_often:
            return None
        if RUNTIME.policy == "off":
            return None
        self._layouts = self._layouts or layouts_of(self.call.problem, a.device)
        for layout in self._layouts:
            if layout is None:
                return None
            packed = self._pack(weights, layout, a.device)
            kernel = None if packed is None else self._kernel_of_layout(packed, a)
            if packed is not None and kernel is not None:
                return self._by_packed_kernel(kernel, packed, a, aux)
        return None

    def _kernel_of_layout(self, packed: PackedWeight, a: Tensor) -> Kernel | None:
        try:
            return self._kernel(packed, a)
        except PackedWeightError:
            return None

    def _pack(self, weights: Sequence[Tensor], layout: str, device: torch.device) -> PackedWeight | None:
        """Return the weights in a layout, packed now if they are not. None where no kernel packs them so, or while
        CUDA graphs are being captured."""
        packed = self._packed.get(weights, layout)
        if packed is not None or devices.is_capturing(device):
            return packed
        with torch.inference_mode(False), torch.no_grad():
            try:
                packed = devices.make_lasting(device, partial(self._pack_weights, weights, layout))
            except UnsupportedError as error:
                RUNTIME.warn_once(f"a weight of a compiled graph is served unpacked: {error}")
                return None
        if packed is None:
            return None
        self._packed.put(weights, layout, packed)
        return packed

    def _pack_weights(self, weights: Sequence[Tensor], layout: str) -> PackedWeight | None:
        """Return the weights in a layout; None for an int4 weight that ``pack`` does not take. Raises UnsupportedError
        where no kernel packs them so."""
        arguments = self._pack_arguments(weights)
        return None if arguments is None else pack(**arguments, m=[self.call.problem], layout=layout)

    def _pack_arguments(self, weights: Sequence[Tensor]) -> dict[str, Any] | None:
        """Return the arguments of ``pack`` that are the weight; None for an int4 weight that ``pack`` does not take."""
        parts, quant = len(self.call.parts), self.call.problem.b.quant
        if self.call.form == "matrix":
            return {"weight": weights[0].t()}
        if quant is None:
            return {"weight": _joined(weights[:parts])}
        if self.call.form == "int4pack":
            return int4pack_arguments(weights[:parts], weights[parts:], quant.group, self.call.problem.k)
        scale, zero_point = self._quantization(weights)
        return {
            "weight": _joined(weights[:parts]), "scale": scale, "zero_point": zero_point, "group_size": quant.group
        }  # fmt: skip

    def _by_packed_kernel(self, kernel: Kernel, packed: PackedWeight, a: Tensor, aux: Sequence[Tensor]) -> Run:
        """Return a function that packs the weights again where they have changed."""
        forms, device, layout = self._packed, a.device, packed.layout
        self._bind_plan(layout, a, packed, aux)
        launch = self._bound(kernel, a, packed, aux)
        run_kernel = _unbound(kernel, device)

        def run(out: Tensor, a: Tensor, weights: Sequence[Tensor], aux: Sequence[Tensor]) -> None:
            packed = forms.get(weights, layout)
            if packed is None:
                packed = None if forms.changes_often else self._pack(weights, layout, device)
                if packed is None:
                    self._forget_runs()
                    self._plain(a, weights, aux)(out, a, weights, aux)
                    return
            if launch is None:
                run_kernel(a, packed, aux, out)
            else:
                launch(out, a, *packed.data, *aux)

        guarded = self._guarded(kernel, run)
        self._remember_interval(layout, kernel, a, aux, launch, guarded)
        return guarded

    def _bound(self, kernel: Kernel, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Callable[..., None] | None:
        """Return the kernel's launch by address; None where it has none."""
        if not isinstance(b, Tensor | PackedWeight):
            return None
        key, launch = (kernel, kernel.overlap), None
        try:
            if self._is_dense(a, aux):
                if key not in self._launches:
                    self._launches[key] = kernel.bind_any_m(a, b, aux)
                launch = self._launches[key]
            if launch is None:  # binding reads M from the operands
                launch = bind_launch(kernel, Call(self.call.problem, a, b, tuple(aux), ()), (a, b, *aux))
        except (KernelError, UnsupportedError) as error:
            warn_refused(kernel, error)
            return None
        return None if launch is None else with_device_guard(launch, kernel, a.device)

    def _guarded(self, kernel: Kernel, run: Run) -> Run:
        """Return ``run``, made to be served by PyTorch where a launch is refused."""

        def guarded(out: Tensor, a: Tensor, weights: Sequence[Tensor], aux: Sequence[Tensor]) -> None:
            try:
                run(out, a, weights, aux)
            except LAUNCH_ERRORS as error:
                error.__traceback__ = None  # its frames hold the memory that the launch could allocate
                warn_refused(kernel, error)
                self._plain(a, weights, aux)(out, a, weights, aux)

        return guarded

    def _plain(self, a: Tensor, weights: Sequence[Tensor], aux: Sequence[Tensor]) -> Run:
        """Return a function by PyTorch's own functions, of any M where that is ``torch.mm`` alone."""
        if self.call.problem.is_mm_alone:

            def multiply(out: Tensor, a: Tensor, weights: Sequence[Tensor], aux: Sequence[Tensor]) -> None:
                torch.mm(a, self._raw(weights), out=out)

            return multiply
        product = self._int4pack_product if self.call.form == "int4pack" else None
        compute = specialize_fallback(self._described(a, self._raw(weights), aux), product)

        def run(out: Tensor, a: Tensor, weights: Sequence[Tensor], aux: Sequence[Tensor]) -> None:
            write_result(out, compute(a, self._raw(weights), aux))

        return run

    def _int4pack_product(self, a: Tensor, weights: Sequence[Tensor], aux: Sequence[Tensor]) -> Tensor:
        """Return the product by ``_weight_int4pack_mm``, without the Problem's norm and steps."""
        problem, parts = self.call.problem, len(self.call.parts)
        assert problem.b.quant is not None
        group = problem.b.quant.group or problem.k
        operands = zip(weights[:parts], weights[parts:], strict=True)
        products = [int4pack.multiply(a, packed, group, scales_and_zeros) for packed, scales_and_zeros in operands]
        return products[0] if parts == 1 else torch.cat(products, 1)


def int4pack_arguments(
    packed: Sequence[Tensor], scales_and_zeros: Sequence[Tensor], group: int | None, k: int
) -> dict[str, Any] | None:
    """Return the arguments of ``pack`` for int4 weights in the layout of ``_weight_int4pack_mm``, side by side; None
    where one has no zero points (``int4pack.zero_points``). scales_and_zeros: theirs. group: None if it is K."""
    scales = int4pack.zero_points(torch.cat(list(scales_and_zeros), 1))
    if scales is None:
        return None
    operands = zip(packed, scales_and_zeros, strict=True)
    values = torch.cat([int4pack.unpacked_integers(data, group or k, own, k) for data, own in operands])
    return {
        "weight": int4pack.nibbles(values), "bits": 4, "group_size": group, "scale": scales[0], "zero_point": scales[1]
    }  # fmt: skip


def _scales_of(call: GraphCall) -> MergedWeights | GroupedScales:
    """Return what has the scales, or the zero points, of a call's weights as kernels take them."""
    quant = call.problem.b.quant
    if quant is None or (quant.group is None and not quant.zero_point):
        return MergedWeights(movable=False)
    groups = 1 if quant.group is None else -(-call.problem.k // quant.group)
    return GroupedScales(dtype_of(quant.scale_dtype), groups)


def _unbound(kernel: Kernel, device: torch.device) -> Callable[..., None]:
    """Return a function (a, b, aux, out) by a kernel that has no launch by address."""
    if not devices.is_host(device.type) or not kernel.has_functional:
        return with_device_guard(kernel.run, kernel, device)

    def run(a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        write_result(out, kernel.functional(a, b, aux))

    return run


def write_result(out: Tensor, result: Tensor) -> None:
    """Have ``out`` contain a new tensor's elements. On a CPU it takes over the tensor's memory if it has memory of its
    own: oneDNN's products allocate their results, and copying 256 rows takes up to a tenth of the product's time."""
    if (
        devices.is_host(out.device.type)
        and (result.dtype, result.shape, result.stride()) == (out.dtype, out.shape, out.stride())
        and out.untyped_storage().nbytes() == out.nbytes
    ):
        out.set_(result)  # type: ignore[call-overload]
    else:
        out.copy_(result)


def _joined(weights: Sequence[Tensor]) -> Tensor:
    return weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
