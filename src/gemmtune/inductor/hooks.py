"""Everything of gemmtune that depends on private parts of Inductor, AOTAutograd and Dynamo.

docs/reference/torch-versions.md has the versions of torch that it was tested with.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch._inductor
import torch._inductor.config as inductor_config
from torch import fx
from torch._functorch._aot_autograd import autograd_cache
from torch._guards import TracingContext
from torch._inductor import ir, lowering
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import _disable_current_modes

from .graph_call import GraphCall
from .operator import product

__all__ = [
    "PROVENANCE", "CustomGraphPass", "ProductKernel", "compile_graph", "compiles_python", "constant_inputs",
    "disable_pdl", "get_hash_for_files", "inductor_config", "is_body", "is_pdl_safe", "mode_options",
    "outside_of_compilation", "time_kernels_on_device",
]  # fmt: skip


# Timing of Inductor's kernels: the number of groups of calls, the most calls and seconds of a group, the most trials,
# and the cycles of a GPU's clock in a second, about.
_GROUPS, _GROUP_CALLS, _GROUP_S, _TRIALS, _CYCLES_PER_S = 5, 8, 1e-3, 3, 2e9

PROVENANCE = "gemmtune_provenance"  # the key of a node's metadata with a line about its kernel


def mode_options() -> dict[str, dict[str, Any]]:
    """Return the patches of Inductor's configuration for each mode of ``torch.compile``."""
    modes: dict[str, dict[str, Any]] = torch._inductor.list_mode_options()
    return modes


def compiles_python() -> bool:
    """Whether Inductor generates Python code, which can call a CallSite: not for AOTInductor and its C++ wrapper."""
    return not (inductor_config.cpp_wrapper or V.aot_compilation)


def constant_inputs(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the inputs of a graph that are Parameters and buffers, and its own constants: the same tensors in every
    call.

    Empty for graphs that compute gradients: training changes the weights in every step.
    """
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None or metadata.traced_tangents:
        return frozenset()
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(metadata.input_info) or is_body(graph):
        return frozenset()
    mutated = {index for index, info in enumerate(metadata.input_info) if info.mutates_data}
    chosen = [index for index in metadata.static_input_indices if index not in mutated]
    own = [node for node in graph.nodes if node.op == "get_attr" and isinstance(node.meta.get("val"), torch.Tensor)]
    return frozenset([*own, *(placeholders[index] for index in chosen)])


def is_body(graph: fx.Graph) -> bool:
    """Whether a graph is the body of a branch or a loop, whose inputs AOTAutograd has not described."""
    return any("desc" not in node.meta for node in graph.nodes if node.op == "placeholder")


def is_pdl_safe(graph: fx.Graph) -> bool:
    """Whether Inductor's kernels for a graph order all accesses under programmatic dependent launch.

    A kernel of Inductor's waits for the kernel in front of it before it signals that the next one may begin, unless it
    reads nothing: such a kernel may end before the kernel in front of it, and the next one, which waits for it alone,
    may then read too early. So no operation may make a tensor without reading one. The graphs of training, in which
    Inductor adds such kernels (sums into zeros), are not safe either.
    """
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None or metadata.traced_tangents:
        return False
    return all(
        any(isinstance(each.meta.get("val"), torch.Tensor) for each in node.all_input_nodes)
        for node in graph.nodes
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
    )


def disable_pdl() -> None:
    """Disable Inductor's programmatic dependent launch for the compilation that is under way, whose patches have it."""
    inductor_config.triton.enable_pdl = False


def time_kernels_on_device() -> None:
    """Have Inductor's autotuning time its Triton kernels by the GPU's clock alone, for the rest of this process.

    A kernel of a decode step takes 2 to 10 us. Inductor (torch 2.11 and 2.13) measures the time between two events with
    one call between them, which is the host's time for a launch where that is longer: 17 to 39 us, by chance, for the
    kernels of a step (benchmarks/results/inductor-timing-h200-20261128.txt). Here the calls wait in the stream until
    all of them are launched (``_queued_ms``). Arguments that a kernel overwrites are copied before the calls; Inductor
    copies them within each timed call, which took 78 us and more (inductor-autotuning-h200-20261126.txt).
    """
    from torch._inductor.runtime import triton_heuristics

    heuristics: Any = triton_heuristics
    autotuner = heuristics.CachingAutotuner
    inductors_bench = autotuner.bench
    if getattr(inductors_bench, "times_on_device", False):
        return

    @functools.wraps(inductors_bench)
    def bench(self: Any, launcher: Any, *args: Any, with_profiler: bool = False, **kwargs: Any) -> Any:
        overwritten = self.mutated_arg_names
        if not overwritten:
            return inductors_bench(self, launcher, *args, with_profiler=with_profiler, **kwargs)
        saved = self.copy_args_to_cpu_if_needed(*args, **kwargs)  # those of which memory has no room for a second copy
        copies, named_copies = self.maybe_clone_args(saved, *args, **kwargs)
        self.mutated_arg_names = ()
        try:
            return inductors_bench(self, launcher, *copies, with_profiler=with_profiler, **named_copies)
        finally:
            self.mutated_arg_names = overwritten
            self.restore_args_from_cpu(saved)

    class QueueBenchmarker(type(heuristics.benchmarker)):  # type: ignore[misc]
        def benchmark_gpu(self, call: Callable[[], Any], *args: Any, **kwargs: Any) -> float:
            return _queued_ms(call)

    bench.times_on_device = True  # type: ignore[attr-defined]
    autotuner.bench, heuristics.benchmarker = bench, QueueBenchmarker()


def _queued_ms(call: Callable[[], Any]) -> float:
    """Return the milliseconds that a GPU takes for a call that follows another one: the median of ``_GROUPS`` groups.

    The stream sleeps while the calls are launched. Where the sleep ends before that, they are timed again behind a
    longer one.
    """
    cuda: Any = torch.cuda  # whose annotations are incomplete
    events = [cuda.Event(enable_timing=True) for _ in range(_GROUPS + 1)]
    call()
    cuda.synchronize()
    start = time.perf_counter()
    call()
    cuda.synchronize()
    alone_s = time.perf_counter() - start
    calls = max(1, min(_GROUP_CALLS, int(_GROUP_S / alone_s)))
    sleep_s = _GROUPS * calls * alone_s
    for _ in range(_TRIALS):
        cuda._sleep(int(_CYCLES_PER_S * sleep_s))
        events[0].record()
        for event in events[1:]:
            for _ in range(calls):
                call()
            event.record()
        was_queued = not events[0].query()
        cuda.synchronize()
        if was_queued:
            break
        sleep_s *= 4.0
    group_ms: list[float] = [first.elapsed_time(last) for first, last in itertools.pairwise(events)]
    return statistics.median(group_ms) / calls


@contextmanager
def outside_of_compilation() -> Iterator[None]:
    """Return a context without the fake tensors and the modes of the compilation that is under way."""
    with _disable_current_modes(), torch.no_grad():
        yield


class DecidingPass(Protocol):
    """What ``compile_graph`` asks of a pass that makes decisions while a graph is compiled."""

    def tune_ahead(self, graph: fx.Graph) -> None:
        """Make the decisions for a graph of inference that Inductor has made no key of yet."""

    def decisions(self) -> str:
        """Return a digest of all decisions."""

    def without_decisions(self) -> AbstractContextManager[None]:
        """Return a context in which the pass's ``uuid()`` does not depend on decisions."""


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], patches: Mapping[str, Any], descends: bool,
    deciding: DecidingPass | None = None,
) -> Any:  # fmt: skip
    """Return ``compile_fx``'s result under patches of Inductor's configuration. descends: whether by
    coordinate_descent_tuning, which must be part of a pass's ``uuid()``. deciding: a pass of the patches, which decides
    for a graph of inference before Inductor makes the graph's key.

    With coordinate_descent_tuning, Inductor's decompositions make reductions of products by one row on a GPU, for which
    gemmtune has kernels. So it is off while the graph is traced, when AOTAutograd makes the graph's key, and on when
    code is generated. (A table of decompositions as an argument would do, too, but Inductor caches no graph that has
    one.)
    """

    def compile_inner(graph_module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        if deciding is not None and kwargs.get("is_inference"):
            deciding.tune_ahead(graph_module.graph)
        with inductor_config.patch({"coordinate_descent_tuning": descends}):
            return compile_fx_inner(graph_module, inputs, **kwargs)

    traced = {**patches, "coordinate_descent_tuning": False}
    with nullcontext() if deciding is None else _saved_under_decisions(deciding):
        return compile_fx(gm, example_inputs, inner_compile=compile_inner, config_patches=traced)


@contextmanager
def _saved_under_decisions(deciding: DecidingPass) -> Iterator[None]:
    """Return a context in which AOTAutograd saves a graph of inference under the decisions that are in force by then.

    AOTAutograd makes a graph's key before it traces the graph, and saves the compiled graph under this key: decisions
    that are made between the two would be missing in it. So here the key ends with a digest of the decisions, which is
    replaced when the graph is saved.
    """
    cache: Any = autograd_cache.AOTAutogradCache
    make_key, save = autograd_cache.autograd_cache_key, cache.save
    stems: dict[str, str] = {}

    def make_key_with_decisions(*args: Any, **kwargs: Any) -> tuple[str, list[str]]:
        with deciding.without_decisions():
            stem, lines = make_key(*args, **kwargs)
        key = stem + deciding.decisions()
        stems[key] = stem
        return key, lines

    def save_under_decisions(key: str, *args: Any, **kwargs: Any) -> None:
        save(stems[key] + deciding.decisions() if key in stems else key, *args, **kwargs)

    autograd_cache.autograd_cache_key, cache.save = make_key_with_decisions, staticmethod(save_under_decisions)
    try:
        yield
    finally:
        autograd_cache.autograd_cache_key, cache.save = make_key, staticmethod(save)


class ProductKernel(ir.ExternKernelOut):
    """A call of a CallSite in generated code. text: ``GraphCall.to_json``. comment: a line above the call."""

    def __init__(self, text: str, layout: Any, inputs: list[Any], comment: str = "") -> None:
        super().__init__(layout, inputs, python_kernel_name="", op_overload=product)
        self.text, self.comment = text, comment
        self.python_kernel_name = f"gemmtune_{self.get_name()}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def codegen(self, wrapper: Any) -> None:
        graph: Any = V.graph
        while getattr(graph, "parent", None) is not None:  # the code of a branch or a loop has no imports of its own
            graph = graph.parent
        graph.wrapper_code.add_import_once("from gemmtune.inductor.call_site import CallSite")
        signals = bool(getattr(inductor_config.triton, "enable_pdl", False))
        dynamic = any(getattr(size, "free_symbols", None) for size in self.get_size())
        graph.wrapper_code.add_import_once(f"{self.python_kernel_name} = CallSite({self.text!r}, {signals}, {dynamic})")
        if self.comment:
            wrapper.make_comment(f"# gemmtune: {self.comment}")
        super().codegen(wrapper)


def _lower(a: Any, operands: list[Any], call: str) -> Any:
    """Lower ``gemmtune::product`` to a ProductKernel. Dense operands stay dense; others keep the strides that the
    Problem was made of."""
    described = GraphCall.from_json(call)
    node: Any = V.graph.current_node
    constant = described.problem.b.constant
    inputs = [_dense(a) if constant else _as_traced(a, node.args[0])]
    for index, (operand, argument) in enumerate(zip(operands, node.args[1], strict=True)):
        is_matrix = index < described.weight_count
        inputs.append(_as_traced(operand, argument) if is_matrix else _dense(operand))
    size = [*a.get_size()[:-1], described.problem.columns]
    layout = ir.FixedLayout(a.get_device(), described.out_dtype, size)
    return ir.TensorBox.create(ProductKernel(call, layout, inputs, node.meta.get(PROVENANCE, "")))


def _dense(x: Any) -> Any:
    return ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x))


def _as_traced(x: Any, argument: Any) -> Any:
    if argument.op in ("placeholder", "get_attr"):
        return ir.ExternKernel.realize_input(x)
    return ir.ExternKernel.require_exact_strides(ir.ExternKernel.realize_input(x), argument.meta["val"].stride())


lowering.register_lowering(product, type_promotion_kind=None)(_lower)
