"""All private names of torch that gemmtune uses, which PyTorch may rename or remove in any version.

All of them exist in the versions of TESTED (docs/reference/torch-versions.md lists the tests run with each). Where a
name is missing, a public function replaces it if there is one: slower, but equally correct. If there is none, importing
this module raises ImportError. Modules of the hot path bind the names at import.

Private attributes of objects (``nn.Module._parameters``, ``OpOverload._schema``) are not listed here; they are used
directly. This module imports nothing from gemmtune.
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

TESTED = ("2.9.1", "2.10.0", "2.11.0", "2.13.0", "2.15.0")


def _required(path: str) -> Any:
    """Return the object at a dotted path below ``torch``. Raises ImportError when this torch does not have it."""
    try:
        return reduce(getattr, path.split("."), torch)
    except AttributeError:
        raise ImportError(
            f"gemmtune needs torch.{path}, which torch {torch.__version__} does not have: gemmtune was tested "
            f"with torch {', '.join(TESTED)}. Install one of these"
        ) from None


def _optional(path: str, fallback: Any) -> Any:
    """Return the object at a dotted path below ``torch``, or ``fallback`` when this torch does not have it."""
    try:
        return reduce(getattr, path.split("."), torch)
    except AttributeError:
        return fallback


# --- tensors -----------------------------------------------------------------------------------------------------


def _empty_strided(device: str) -> Callable[..., torch.Tensor]:
    def empty(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)

    return empty


# The fastest allocation functions of torch: (sizes, strides, dtype). ``empty_cuda`` allocates on the current device.
# Code that torch's compiler generates calls them.
empty_cpu: Callable[..., torch.Tensor] = _optional("_C._dynamo.guards._empty_strided_cpu", _empty_strided("cpu"))
empty_cuda: Callable[..., torch.Tensor] = _optional("_C._dynamo.guards._empty_strided_cuda", _empty_strided("cuda"))

# Increments the version counter of each tensor of a tuple, which its views share; inference tensors have none. The
# public function takes twice as long (0.16 us instead of 0.07 us).
increment_version: Callable[[tuple[torch.Tensor, ...]], None] = _optional(
    "_C._increment_version", torch.autograd.graph.increment_version
)

# A C++ guard that compares tensors with expected ones (type, dispatch keys, dtype, device, sizes, strides). None where
# it is missing: dispatch.guards has a Python implementation.
TensorGuards: Any = _optional("_C._dynamo.guards.TensorGuards", None)

# A tensor's dispatch keys and their types, which show whether a transform or a mode wrapped it. No public form exists.
dispatch_keys = _required("_C._dispatch_keys")
DispatchKey = _required("_C.DispatchKey")
DispatchKeySet = _required("_C.DispatchKeySet")


def _no_use_count(address: int) -> int:
    return sys.maxsize


# How many tensors and Python objects use a storage, by its address in PyTorch. Where it cannot be told: more than any.
_use_count: Callable[[int], int] = _optional("_C._storage_Use_Count", _no_use_count)


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and Python objects use a storage, ``storage`` itself among them."""
    return _use_count(storage._cdata)


# Constructors of subclass instances: one without memory of its own, and a view of another tensor's memory.
make_wrapper_subclass = _required("Tensor._make_wrapper_subclass")
make_subclass = _required("Tensor._make_subclass")


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a FakeTensor, which has a shape and no values.

    There can be no FakeTensor before torch._subclasses.fake_tensor is imported, and this function does not import it.
    """
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


# --- the state of a thread ---------------------------------------------------------------------------------------

# The number of active dispatch modes (make_fx, fake tensors), the innermost functorch transform, and jit's tracer.
len_torch_dispatch_stack: Callable[[], int] = _required("_C._len_torch_dispatch_stack")
peek_interpreter_stack: Callable[[], Any] = _required("_C._functorch.peek_interpreter_stack")
get_tracing_state: Callable[[], Any] = _required("_C._get_tracing_state")
set_tracing_state: Callable[[Any], None] = _required("_C._set_tracing_state")

# Whether autocast is enabled for any device type.
is_any_autocast_enabled: Callable[[], bool] = _optional(
    "_C._is_any_autocast_enabled", lambda: any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
)

# The module whose ``_current_level`` is the level of forward-mode differentiation (-1: none). The number changes, so it
# must be read from its module; a function that reads it would cost every call a Python frame.
_required("autograd.forward_ad._current_level")
forward_ad: Any = _forward_ad

# Context managers that disable overrides by subclasses and function modes, by subclasses only, and by subclasses'
# __torch_dispatch__.
DisableTorchFunction = _required("_C.DisableTorchFunction")
DisableTorchFunctionSubclass = _required("_C.DisableTorchFunctionSubclass")
DisableTorchDispatch = _required("_C._DisableTorchDispatch")
disabled_torch_function_impl = _required("_C._disabled_torch_function_impl")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def disable_dynamo(function: _Function) -> _Function:
    """Make torch.compile insert a graph break at calls of a function.

    The public decorator is used only where the private one is missing: it imports the compiler immediately.
    """
    disabled: _Function = _optional("_compile._disable_dynamo", torch.compiler.disable)(function)
    return disabled


# A function that raises RuntimeError unless a condition is true (symbolic sizes are supported), and a map over nested
# containers.
check: Callable[..., None] = _required("_check")
tree_map: Callable[..., Any] = _required("utils._pytree.tree_map")


# --- the profiler ------------------------------------------------------------------------------------------------


def _record(name: str, inputs: Sequence[Any]) -> AbstractContextManager[object]:
    return torch.profiler.record_function(name)


# A context manager that records an event of torch.profiler with the shapes of its input tensors: (name, inputs). It
# is recorded in the same cases as PyTorch's own operators. The public function takes no inputs.
RecordFunction: Callable[[str, Sequence[Any]], AbstractContextManager[object]] = _optional(
    "_C._profiler._RecordFunctionFast", _record
)

# The module whose ``_is_profiler_enabled`` says whether a profiler of any thread is active; a module, as for
# ``forward_ad``. A profiler that Kineto's daemon starts does not set it; with the daemon it is therefore always True.
_required("autograd.profiler._is_profiler_enabled")
profiler: Any = _profiler if "KINETO_USE_DAEMON" not in os.environ else SimpleNamespace(_is_profiler_enabled=True)


# --- CUDA --------------------------------------------------------------------------------------------------------
# A CPU build has none of these names. The public functions first check that CUDA is initialized, or create objects.


def _current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


current_device: Callable[[], int] = _optional("_C._cuda_getDevice", torch.cuda.current_device)
stream_of: Callable[[int], int] = _optional("_C._cuda_getCurrentRawStream", _current_stream)  # a cudaStream_t
is_capturing: Callable[[], bool] = _optional(
    "_C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
# Keeps a stream busy for a number of cycles.
cuda_sleep: Callable[[int], None] = _required("cuda._sleep")
# End the recording of allocations for a CUDA graph's pool, and release it: (device, pool). They clean up after a failed
# capture, for which there is no public function; without them the memory stays in the pool.
end_allocate_to_pool: Callable[[int, Any], None] = _optional("_C._cuda_endAllocateToPool", lambda device, pool: None)
release_pool: Callable[[int, Any], None] = _optional("_C._cuda_releasePool", lambda device, pool: None)


# --- operators ---------------------------------------------------------------------------------------------------
# ATen operators whose names begin with an underscore; few have a public form. gemmtune has ops for the first two. Each
# other one serves single candidates: it is None where this torch does not have it, and its candidates are unsupported.
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
# ``view`` whose result is not tracked as a view. An operator with a gradient must return such a tensor, since autograd
# forbids in-place writes to a view that was created inside the operator.
unsafe_view: Any = _required("ops.aten._unsafe_view.default")
# The operator that a subclass with __torch_dispatch__ receives for ``Tensor.to``.
to_copy: Any = _required("ops.aten._to_copy.default")

# The address and the bytes of a tensor in a layout of oneDNN, which has no storage.
mkldnn_address: Any = _optional("ops.mkldnn.data_ptr", lambda tensor: 0)
mkldnn_bytes: Any = _optional("ops.mkldnn._nbytes", lambda tensor: 0)

# Functions that return whether oneDNN supports products of a dtype on this CPU.
MKLDNN_SUPPORTS: dict[str, Callable[[], bool]] = {
    "bfloat16": _optional("ops.mkldnn._is_mkldnn_bf16_supported", lambda: False),
    "float16": _optional("ops.mkldnn._is_mkldnn_fp16_supported", lambda: False),
}
