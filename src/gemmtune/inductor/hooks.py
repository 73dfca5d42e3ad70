"""Everything of gemmtune that depends on private parts of Inductor, AOTAutograd and Dynamo.

docs/reference/torch-versions.md has the versions of torch that it was tested with.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._inductor
import torch._inductor.config as inductor_config
from torch import fx
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
    "outside_of_compilation", "time_kernels_without_copies",
]  # fmt: skip


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


def time_kernels_without_copies() -> None:
    """Have Inductor's autotuning copy the arguments that a Triton kernel overwrites before it times a configuration,
    for the rest of this process.

    Inductor (torch 2.11 and 2.13) copies them within each timed call. Both took 78 us and more, and a kernel of a
    decode step alone takes 2 to 10 us, so that noise chose the configuration: a norm with a residual took 3, 33 or 66
    us in different compilations on an H200 (benchmarks/results/inductor-autotuning-h200-20261126.txt).
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    inductors_bench: Any = CachingAutotuner.bench
    if getattr(inductors_bench, "copies_once", False):
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

    bench.copies_once = True  # type: ignore[attr-defined]
    CachingAutotuner.bench = bench  # type: ignore[method-assign]


@contextmanager
def outside_of_compilation() -> Iterator[None]:
    """Return a context without the fake tensors and the modes of the compilation that is under way."""
    with _disable_current_modes(), torch.no_grad():
        yield


def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], patches: Mapping[str, Any]) -> Any:
    """Return ``compile_fx``'s result under patches of Inductor's configuration.

    With coordinate_descent_tuning, Inductor's decompositions make reductions of products by one row on a GPU, for which
    gemmtune has kernels. So it is off while the graph is traced, and on when code is generated. (A table of
    decompositions as an argument would do, too, but Inductor caches no graph that has one.)
    """
    descends = bool(patches.get("coordinate_descent_tuning", inductor_config.coordinate_descent_tuning))
    inner = inductor_config.patch({"coordinate_descent_tuning": descends})(compile_fx_inner)
    traced = {**patches, "coordinate_descent_tuning": False}
    return compile_fx(gm, example_inputs, inner_compile=inner, config_patches=traced)


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
        graph.wrapper_code.add_import_once(f"{self.python_kernel_name} = CallSite({self.text!r}, {signals})")
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
