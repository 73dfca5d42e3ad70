"""``torch.compile(model, backend="gemmtune")``, and gemmtune inside ``backend="inductor"``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..core.devices import is_served
from ..core.errors import GemmtuneError
from ..dispatch.runtime import RUNTIME
from ..tuning.api import start_workers
from .graph_pass import ProductPass, TunedMeanwhile, store_of
from .graph_report import GraphReport
from .hooks import compile_graph, inductor_config, is_body, time_kernels_on_device
from .options import PDL, Options, launch_patches, parse_options

if TYPE_CHECKING:
    from ..tuning.worker_pool import WorkerPool

_PDL_CAPABILITY = (9, 0)  # the first compute capability with programmatic dependent launch
_PRODUCT_WORDS = ("linear", "mm", "matmul", "dot", "einsum")
MAX_RESTARTS = 3  # a graph is compiled again when the pass has tuned its Problems; its parts may have other Problems


def gemmtune_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo by Inductor, with gemmtune's kernels for the products for which they are fastest.

    Registered as the Dynamo backend ``gemmtune``. Raises as ``parse_options``, and what Inductor raises.
    """
    parsed = parse_options(mode, options)
    launches: dict[str, Any] = {}
    if parsed.tunes_pointwise and _cuda_devices(example_inputs):
        time_kernels_on_device()
        launches = launch_patches(parsed) if _can_launch_early(example_inputs) else {}
    asked: set[str] = set()
    with _workers_of_cold_store(parsed, gm, example_inputs) as pools:
        for restart in range(MAX_RESTARTS + 1):
            graph_pass = ProductPass(
                parsed, _user_passes(parsed), restarts=restart < MAX_RESTARTS, asked=asked, checks_pdl=PDL in launches,
                pools=pools,
            )  # fmt: skip
            patches = {**launches, **parsed.inductor, "post_grad_custom_pre_pass": graph_pass}
            try:
                compiled: Any = compile_graph(gm, example_inputs, patches, parsed.descends, graph_pass)
                return compiled  # type: ignore[no-any-return]
            except Exception as error:  # Inductor wraps what a pass raises in an error of its own
                if not _was_raised_by(error, TunedMeanwhile):
                    raise
    raise AssertionError("unreachable: the last attempt raises or returns")


@contextmanager
def _workers_of_cold_store(
    options: Options, gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> Iterator[dict[torch.device, WorkerPool]]:
    """Return a context with workers by device, for devices on which nothing was tuned yet and products are tuned on a
    miss: they start while the graph is traced."""
    store = RUNTIME.store() if options.store is None else options.store
    pools: dict[torch.device, WorkerPool] = {}
    if options.policy != "on-miss" or store is None or not _may_multiply(gm):
        yield pools
        return
    tensors = [value.device for value in example_inputs if isinstance(value, torch.Tensor)]
    with ExitStack() as stack, store_of(options):
        for device in filter(is_served, dict.fromkeys(tensors)):
            if RUNTIME.index(device).is_empty:
                with suppress(GemmtuneError, ValueError):  # tuning raises it, if it comes to that
                    pools[device] = stack.enter_context(closing(start_workers(device, store)))
        yield pools


def _may_multiply(gm: fx.GraphModule) -> bool:
    """Whether a function or method in a graph of Dynamo, or in a body of one of its branches, has a product's name."""
    called = (
        node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        for module in gm.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
        if node.op in ("call_function", "call_method")
    )
    return any(word in name for name in called for word in _PRODUCT_WORDS)


def _cuda_devices(example_inputs: Sequence[Any]) -> set[torch.device]:
    """Return the GPUs of a graph's tensors."""
    devices = {value.device for value in example_inputs if isinstance(value, torch.Tensor)}
    return {device for device in devices if device.type == "cuda"}


def _can_launch_early(example_inputs: Sequence[Any]) -> bool:
    """Whether the GPUs of a graph's tensors, of which there is one at least, have programmatic dependent launch."""
    return torch.version.hip is None and all(
        torch.cuda.get_device_capability(device) >= _PDL_CAPABILITY for device in _cuda_devices(example_inputs)
    )


class _Explained(Exception):
    """Raised when a graph has been reported, so that no code is generated for it."""


def explain(
    model: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> list[GraphReport]:
    """Return what the backend would make of ``model(*args, **kwargs)``: a report for each graph, and for each body of a
    branch or a loop in front of its graph's.

    The call runs once, eagerly and without gradients; no code is generated. options: as for ``compile``; the policy is
    ``cached`` unless it is given, so that nothing is tuned. Raises as ``parse_options``, and what the model raises.
    """
    parsed = parse_options(None, {"policy": "cached", **(options or {})})
    reports: list[GraphReport] = []

    def collect(graph: fx.Graph, report: GraphReport) -> None:
        reports.append(report)
        if not is_body(graph):
            raise _Explained

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graph_pass = ProductPass(parsed, on_report=collect)
        patches = {**parsed.inductor, "post_grad_custom_pre_pass": graph_pass, "force_disable_caches": True}
        try:
            compile_graph(gm, example_inputs, patches, parsed.descends)
        except Exception as error:  # Inductor wraps what a pass raises in an error of its own
            if not _was_raised_by(error, _Explained):
                raise
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=backend)(*args, **kwargs)
    return reports


def _was_raised_by(error: BaseException | None, kind: type[Exception]) -> bool:
    """Whether an error is of a kind, or was raised because of one of that kind."""
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__ or error.__context__
    return False


def _user_passes(options: Options) -> tuple[Any, ...]:
    """Return the post-grad passes that the user set, which run before gemmtune's."""
    passes = options.inductor.get("post_grad_custom_pre_pass", inductor_config.post_grad_custom_pre_pass)
    listed = () if passes is None else tuple(passes) if isinstance(passes, list | tuple) else (passes,)
    return tuple(each for each in listed if not isinstance(each, ProductPass))


def compile(
    model: Any,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return ``torch.compile(model, backend="gemmtune")``. All arguments are those of ``torch.compile``.

    Raises as ``parse_options`` at once, not at the first call.
    """
    parse_options(mode, options)
    own_options = None if options is None else dict(options)
    return torch.compile(model, backend=_BackendWithArguments(mode, own_options), fullgraph=fullgraph, dynamic=dynamic)


class _BackendWithArguments:
    """The backend with its arguments. Equal ones compile equally, so that Dynamo reuses compiled code."""

    def __init__(self, mode: str | None, options: Mapping[str, Any] | None) -> None:
        self.mode, self.options = mode, options
        self.__name__ = "gemmtune"

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return gemmtune_backend(gm, example_inputs, mode=self.mode, options=self.options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BackendWithArguments) and (self.mode, self.options) == (other.mode, other.options)

    def __hash__(self) -> int:
        return hash((self.mode, repr(self.options)))


class Installation:
    """gemmtune inside ``backend="inductor"``, until ``remove()`` or the end of a ``with`` block."""

    def __init__(self, options: Options) -> None:
        self._before = inductor_config.post_grad_custom_pre_pass
        self._pass = ProductPass(options, _user_passes(options))
        inductor_config.post_grad_custom_pre_pass = self._pass

    def remove(self) -> None:
        """Leave Inductor as it was before, for graphs that are compiled from now on."""
        if inductor_config.post_grad_custom_pre_pass is self._pass:
            inductor_config.post_grad_custom_pre_pass = self._before

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def install(options: Mapping[str, Any] | None = None) -> Installation:
    """Have gemmtune choose the products of every graph that Inductor compiles in this process from now on.

    For programs that call ``torch.compile`` themselves. options: gemmtune's own (``policy``, ``budget``, ``store``,
    ``backends``, ``multi_kernel_hints``); Inductor's are the program's. Raises as ``parse_options``, and ValueError for
    an option of Inductor.
    """
    parsed = parse_options(None, options)
    if options is not None and (others := sorted(set(options) & set(parsed.inductor))):
        raise ValueError(
            f"install(): {', '.join(others)}: Inductor's options are those of torch.compile and torch._inductor.config"
        )
    return Installation(parsed)
