"""Every private name of torch that gemmtune uses: what PyTorch may rename or remove in any version.

All of them exist in the versions of TESTED (docs/torch-versions.md has what was run with each). Where a name
is missing, a public function takes over if there is one, which is slower and as correct; if there is none, importing
this module raises ImportError. Modules of the hot path bind the names when they are imported.

Attributes of objects (``nn.Module._parameters``, ``OpOverload._schema``) are no names of torch, and are used where they
are needed. This module imports nothing of gemmtune.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.utils._pytree
from torch.autograd import forward_ad as _forward_ad
from torch.autograd import profiler as _profiler

TESTED = ("2.10.0", "2.11.0", "2.13.0", "2.15.0")


def _required(path: str) -> Any:
    """The object at a dotted path below torch. Raises ImportError where this torch has none."""
    try:
        return reduce(getattr, path.split("."), torch)
    except AttributeError:
        raise ImportError(
            f"gemmtune needs torch.{path}, which torch {torch.__version__} does not have: gemmtune was tested "
            f"with torch {', '.join(TESTED)}. Install one of these"
        ) from None


def _optional(path: str, fallback: Any) -> Any:
    """The same, or ``fallback``."""
    try:
        return reduce(getattr, path.split("."), torch)
    except AttributeError:
        return fallback


# --- tensors -----------------------------------------------------------------------------------------------------


def _empty_strided(device: str) -> Callable[..., torch.Tensor]:
    def empty(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)

    return empty


# New tensors by the shortest way that torch has: (sizes, strides, dtype). ``empty_cuda``'s are on the current device.
# What torch's compiler makes calls them.
empty_cpu: Callable[..., torch.Tensor] = _optional("_C._dynamo.guards._empty_strided_cpu", _empty_strided("cpu"))
empty_cuda: Callable[..., torch.Tensor] = _optional("_C._dynamo.guards._empty_strided_cuda", _empty_strided("cuda"))

# Counts a write into each tensor of a tuple in its version counter, which its views share; inference tensors have none.
# The public function takes twice as long (0.16 us for 0.07).
increment_version: Callable[[tuple[torch.Tensor, ...]], None] = _optional(
    "_C._increment_version", torch.autograd.graph.increment_version
)

# A check whether tensors are like others (type, dispatch keys, dtype, device, sizes, strides), in C++. None where it is
# missing: dispatch.guards has one in Python.
TensorGuards: Any = _optional("_C._dynamo.guards.TensorGuards", None)

# The dispatch keys of a tensor, and their types: whether a transform or a mode wrapped it. Nothing public says so.
dispatch_keys = _required("_C._dispatch_keys")
DispatchKey = _required("_C.DispatchKey")
DispatchKeySet = _required("_C.DispatchKeySet")

# Tensors of a subclass: one without memory of its own, and a view of another's memory.
make_wrapper_subclass = _required("Tensor._make_wrapper_subclass")
make_subclass = _required("Tensor._make_subclass")


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it is a FakeTensor, which has a shape and no values. (There is none before the module is imported.)"""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


# --- the state of a thread ---------------------------------------------------------------------------------------

# How many dispatch modes (make_fx, fake tensors) are active, the innermost functorch transform, and jit's tracer.
len_torch_dispatch_stack: Callable[[], int] = _required("_C._len_torch_dispatch_stack")
peek_interpreter_stack: Callable[[], Any] = _required("_C._functorch.peek_interpreter_stack")
get_tracing_state: Callable[[], Any] = _required("_C._get_tracing_state")
set_tracing_state: Callable[[Any], None] = _required("_C._set_tracing_state")

# Whether autocast is on for any kind of device.
is_any_autocast_enabled: Callable[[], bool] = _optional(
    "_C._is_any_autocast_enabled", lambda: any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
)

# The module whose ``_current_level`` is the level of forward-mode differentiation (-1: none). A number that changes has
# to be read of its module; a function that reads it would cost every call a frame.
_required("autograd.forward_ad._current_level")
forward_ad: Any = _forward_ad

# Switch off overrides by subclasses and function modes, by subclasses alone, and by subclasses' __torch_dispatch__.
DisableTorchFunction = _required("_C.DisableTorchFunction")
DisableTorchFunctionSubclass = _required("_C.DisableTorchFunctionSubclass")
DisableTorchDispatch = _required("_C._DisableTorchDispatch")
disabled_torch_function_impl = _required("_C._disabled_torch_function_impl")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def disable_dynamo(function: _Function) -> _Function:
    """Make torch.compile step out of the graph for a function. (The public decorator imports the compiler at once.)"""
    disabled: _Function = _optional("_compile._disable_dynamo", torch.compiler.disable)(function)
    return disabled


# Raises RuntimeError unless a condition holds, also of sizes that are symbols; and a map over nested containers.
check: Callable[..., None] = _required("_check")
tree_map: Callable[..., Any] = _required("utils._pytree.tree_map")


# --- the profiler ------------------------------------------------------------------------------------------------


def _record(name: str, inputs: Sequence[Any]) -> AbstractContextManager[object]:
    return torch.profiler.record_function(name)


# An event of torch.profiler around what runs in it, with the shapes of the tensors among its inputs: (name, inputs). It
# is recorded wherever PyTorch's own operators are. The public function has no inputs.
RecordFunction: Callable[[str, Sequence[Any]], AbstractContextManager[object]] = _optional(
    "_C._profiler._RecordFunctionFast", _record
)

# What has ``_is_profiler_enabled``: whether a profiler of any thread is on. torch's module, as for ``forward_ad``. A
# profiler that Kineto's daemon starts does not set it, so that with the daemon every call asks whether it is recorded.
_required("autograd.profiler._is_profiler_enabled")
profiler: Any = _profiler if "KINETO_USE_DAEMON" not in os.environ else SimpleNamespace(_is_profiler_enabled=True)


# --- CUDA --------------------------------------------------------------------------------------------------------
# A CPU build has none of these names. The public functions first ask whether CUDA is up, or make objects.


def _current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


current_device: Callable[[], int] = _optional("_C._cuda_getDevice", torch.cuda.current_device)
stream_of: Callable[[int], int] = _optional("_C._cuda_getCurrentRawStream", _current_stream)  # a cudaStream_t
is_capturing: Callable[[], bool] = _optional(
    "_C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
# Keeps a stream busy for so many cycles.
cuda_sleep: Callable[[int], None] = _required("cuda._sleep")
# End the recording of allocations for a CUDA graph's pool: (device, pool). For a capture that broke off, which nothing
# public ends; without them its memory stays with the pool.
end_allocate_to_pool: Callable[[int, Any], None] = _optional("_C._cuda_endAllocateToPool", lambda device, pool: None)
release_pool: Callable[[int, Any], None] = _optional("_C._cuda_releasePool", lambda device, pool: None)


# --- operators ---------------------------------------------------------------------------------------------------
# ATen's whose names begin with an underscore; few have a public form. The first two are what ops of gemmtune stand for.
# The others are for single candidates: None where this torch has none, and the candidate is refused.
int_mm: Callable[..., torch.Tensor] = _required("_int_mm")
scaled_mm: Callable[..., torch.Tensor] = _required("_scaled_mm")
addmm_activation: Any = _optional("_addmm_activation", None)
weight_int8pack_mm: Any = _optional("_weight_int8pack_mm", None)
convert_weight_to_int4pack: Any = _optional("_convert_weight_to_int4pack", None)
weight_int4pack_mm: Any = _optional("_weight_int4pack_mm", None)
convert_weight_to_int4pack_for_cpu: Any = _optional("ops.aten._convert_weight_to_int4pack_for_cpu", None)
weight_int4pack_mm_for_cpu: Any = _optional("ops.aten._weight_int4pack_mm_for_cpu", None)
reorder_linear_weight: Any = _optional("ops.mkldnn._reorder_linear_weight", None)
linear_pointwise: Any = _optional("ops.mkldnn._linear_pointwise", None)
# ``view`` whose result counts as a tensor of its own: what an operator with a gradient has to return, since a view that
# was made inside of it takes no writes in place.
unsafe_view: Any = _required("ops.aten._unsafe_view.default")
# What ``Tensor.to`` becomes for a subclass that dispatches.
to_copy: Any = _required("ops.aten._to_copy.default")

# Whether oneDNN multiplies a dtype on this CPU.
MKLDNN_SUPPORTS: dict[str, Callable[[], bool]] = {
    "bfloat16": _optional("ops.mkldnn._is_mkldnn_bf16_supported", lambda: False),
    "float16": _optional("ops.mkldnn._is_mkldnn_fp16_supported", lambda: False),
}
