"""OpSpec: one description of an op, which its public function, the miss path, tracing and recording read.

An op is a module of this package: its public function, whose body ``OpSpec.public`` generates, and the functions that
its OpSpec names. ``table.py`` lists the ops.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..core.call import Call
from ..core.codegen import compile_function
from ..core.memory import is_subclass
from ..core.problem import Problem
from ..core.weights import PackedWeight
from ..dispatch.another_m import serve_another_m
from ..dispatch.cache import lookup
from ..dispatch.call import CacheMiss, needs_grad, run_uncached, serve_miss, serve_with_torch
from ..dispatch.forms import Forms
from ..dispatch.runtime import RUNTIME
from ..dispatch.specialize import TorchFunction
from ..dispatch.torch_state import is_autocast_on, is_shape_only
from ..fuse import BoundStep
from .dynamo import is_compiling

Public = TypeVar("Public", bound=Callable[..., Tensor])
Arguments = dict[str, Any]  # of the public function, by parameter name, without ``out``

_AUTOCAST_FROM = (torch.float32, torch.bfloat16, torch.float16)


class OpSpec(NamedTuple):
    """Everything that gemmtune knows of one op.

    name: the op's name in errors, events and keys.
    operands: the public function's tensor parameters, in the order of launches: activations, weight, others. Parameters
        whose default is None may be absent.
    describe: from all arguments to the Call, with the functions that adapt later operands. Checks the arguments and
        raises TypeError, ShapeError, DtypeError, GradError or PackedWeightError.
    trace: called with all arguments and out while torch.compile traces; calls PyTorch's ops, or breaks the graph.
    torch_function: from all arguments to PyTorch's own function for them, which is ``required`` where only PyTorch can
        compute them (dtypes that are in no Problem, autocast); None where it has none. Called before ``describe``, in
        any state and with any shapes: checks the types of the arguments first.
    records: describers of the PyTorch functions that ``record()`` sees, by function. Each takes that function's
        arguments and returns a Problem, or None for what is no Problem.
    settings: the parameters that are no tensors and part of the cache's key.
    sizes: the tensor parameters whose number of elements is part of the cache's key, besides the first two operands.
    differentiable: whether the op has a gradient.
    autocasts: whether operands are converted to autocast's dtype where a call is not PyTorch's own.
    packable: whether the weight may be a PackedWeight.
    raw: the attribute of a PackedWeight that has its raw form as this op takes a weight. ``describe`` then has a
        parameter ``constant``. Empty where a weight of this op is never kept in both forms.
    torch_in_special_states: whether ``torch_function`` serves calls under transforms, modes and tensor subclasses.
    bypass: a Python expression over the parameters: calls of which it is true never look into the cache.
    """

    name: str
    operands: tuple[str, ...]
    describe: Callable[..., Call]
    trace: Callable[..., Tensor]
    torch_function: Callable[..., TorchFunction | None]
    records: Mapping[Any, Callable[..., Problem | None]] = MappingProxyType({})
    settings: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    differentiable: bool = True
    autocasts: bool = False
    torch_in_special_states: bool = True
    packable: bool = True
    raw: str = ""
    bypass: str = ""

    def public(self, declared: Public) -> Public:
        """Return the op's public function: it has the signature and docstring of ``declared``, which has no body.

        The body is generated, so that each op pays for its own parameters alone.
        """
        signature = inspect.signature(declared)
        source, names = _public_source(self, signature)
        function: Any = compile_function(self.name, *source, **names)
        function.__doc__, function.__module__ = declared.__doc__, declared.__module__
        function.__annotations__ = dict(declared.__annotations__)
        return function  # type: ignore[no-any-return]

    def miss(self, miss: CacheMiss, arguments: Arguments, out: Tensor | None) -> Tensor:
        """Serve a call that the cache does not serve."""
        function = self.torch_function(**arguments)
        is_required = function is not None and function.required
        is_modified = self._is_modified(arguments)
        is_plain = isinstance(arguments[self.operands[1]], Tensor) and out is None and not is_modified
        if function is not None and is_required and is_plain:
            return serve_with_torch(miss, function.functional)
        if is_required or not miss.is_ordinary:
            if function is not None and is_plain and self.torch_in_special_states and _is_uniform(miss):
                return self._torch_or_better_error(miss, function, arguments)
            return self.uncached(arguments, out)
        call, served, forms = self._served_form(arguments)
        if served is not arguments:
            function, miss = self.torch_function(**served), miss._replace(raw=self.raw)
        miss = miss._replace(forms=forms) if forms is not None else miss
        function = None if is_modified else function
        described_key = None if miss.key is None else miss.key[self._size_count :]
        return serve_miss(
            miss, self.name, call, function, differentiable=self.differentiable, out=out, described_key=described_key,
            sized=[self.operands.index(name) for name in self.sizes],
        )  # fmt: skip

    @property
    def _size_count(self) -> int:
        """How many parts of a call's key (``_key_lines``) may depend on M."""
        return 1 + len(self.sizes)

    def _served_form(self, arguments: Arguments) -> tuple[Call, Arguments, Forms | None]:
        """Return the Call, and the arguments that it describes: ``arguments``, or those with the raw form of a packed
        weight that is kept in both forms, where that form serves; and, for such a weight, which form serves each M.
        Raises as ``describe``."""
        call = self.describe(**arguments)
        packed, device = call.packed, call.a.device
        forms = None if packed is None or not self.raw else RUNTIME.forms(call.problem, packed, device)
        if packed is None or forms is None or not forms.is_raw(call.problem.m):
            return call, arguments, forms
        # These are computed as by a weight that is packed only, at any M.
        if needs_grad(call.tensors) or is_autocast_on(device.type) or is_shape_only(call.a):
            return call, arguments, None
        raw = {**arguments, self.operands[1]: getattr(packed, self.raw)}
        raw_call = self.describe(**raw, constant=True)
        # A raw form of unusual strides is another Problem.
        return (raw_call, raw, forms) if raw_call.problem == call.problem else (call, arguments, None)

    def uncached(self, arguments: Arguments, out: Tensor | None) -> Tensor:
        """Compute a call without the cache. Raises as ``describe``."""
        function = self.torch_function(**arguments)
        if function is not None and function.required and not self._is_modified(arguments):
            operands = [arguments[name] for name in self.operands if arguments[name] is not None]
            if out is None:
                return function.functional(*operands)
            if function.out is None:
                return out.copy_(function.functional(*operands))
            function.out(out, *operands)
            return out
        if self.autocasts and out is None:
            arguments = {**arguments, **_autocast({name: arguments[name] for name in self.operands[:2]})}
        call, _, _ = self._served_form(arguments)
        return run_uncached(self.name, call, out, differentiable=self.differentiable)

    def _is_modified(self, arguments: Arguments) -> bool:
        """Whether the call has an epilogue or an out_dtype, which PyTorch's function does not have."""
        has_dtype = "out_dtype" not in self.settings and arguments.get("out_dtype") is not None
        return has_dtype or bool(arguments.get("epilogue"))

    def _torch_or_better_error(self, miss: CacheMiss, function: TorchFunction, arguments: Arguments) -> Tensor:
        """Call PyTorch's own function, which has to see its operands (transforms, modes, subclasses). Where it refuses
        them, ``describe`` may raise a clearer error."""
        try:
            return serve_with_torch(miss, function.functional)
        except Exception:  # whatever PyTorch raises, describe may say it better
            self.describe(**arguments)
            raise


def _public_source(spec: OpSpec, signature: inspect.Signature) -> tuple[list[str], dict[str, Any]]:
    """Return the lines of an op's public function, and the values of the names in them."""
    parameters = signature.parameters
    optional = [name for name in spec.operands if parameters[name].default is None]
    arguments = ", ".join(f"{name}={name}" for name in parameters if name != "out")
    out = "out" if "out" in parameters else "None"
    traced = f"{arguments}, out=out" if "out" in parameters else arguments
    bypass = [f"    if {spec.bypass}:", f"        return uncached(dict({arguments}), {out})"] if spec.bypass else []
    lines = [
        f"def {spec.name}({_parameters(signature)}):",
        "    if is_compiling():",
        f"        return trace({traced})",
        *bypass,
        *_args_lines(spec.operands, optional),
        "    guarded = args",
        "    try:",
        *_key_lines(spec, optional),
        *_extension_lines(spec, parameters, optional),
        "    except (AttributeError, RuntimeError, TypeError):",  # they are no operands at all, or odd ones
        "        key = None",
        "    result = lookup(key, args, guarded)",
        "    if result is None:",
        "        result = serve_another_m(key, args, guarded)",
        "        if result is None:",
        f"            return miss(CacheMiss(key, args, guarded), dict({arguments}), {out})",
        "    return result",
    ]
    defaults = {
        f"default_{name}": parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    names = {
        "is_compiling": is_compiling, "trace": spec.trace, "uncached": spec.uncached, "miss": spec.miss,
        "CacheMiss": CacheMiss, "PackedWeight": PackedWeight, "lookup": lookup, "extend_key": _extend_key,
        "threads": torch.get_num_threads, "grad_enabled": torch.is_grad_enabled,
        "serve_another_m": partial(serve_another_m, spec._size_count), **defaults,
    }  # fmt: skip
    return lines, names


def _key_lines(spec: OpSpec, optional: list[str]) -> list[str]:
    """Return the lines that set ``key``. It has the shape of the first operand only: a guard compares all shapes, and
    the number of elements of the others tells most calls apart at a lower cost."""
    first, weight = spec.operands[:2]
    shown = f"{weight}._key if packed else {weight}.numel()" if spec.packable else f"{weight}.numel()"
    parts = [
        f"{first}.shape", *[f"{name}.numel()" for name in spec.sizes], repr(spec.name), shown, *spec.settings,
        *[f"{name} is None" for name in optional], "threads()", "grad_enabled()",
    ]  # fmt: skip
    packed = [f"        packed = isinstance({weight}, PackedWeight)"] if spec.packable else []
    return [*packed, f"        key = ({', '.join(parts)})"]


def _extension_lines(spec: OpSpec, parameters: Mapping[str, Any], optional: list[str]) -> list[str]:
    """Return the lines that add an epilogue, an out and an out_dtype to the key, or leave a PackedWeight unguarded."""
    conditions = {"epilogue": "epilogue", "out": "out is not None", "out_dtype": "out_dtype is not None"}
    extras = [name for name in conditions if name in parameters and name not in spec.settings]
    if not extras:
        return []
    packed = "packed" if spec.packable else "False"
    passed = ", ".join(name if name in extras else {"epilogue": "()"}.get(name, "None") for name in conditions)
    lines = [
        f"        if {' or '.join(conditions[name] for name in extras)}:",
        f"            key, args, guarded = extend_key(key, args, {packed}, {passed})",
    ]
    if spec.packable:
        lines += ["        elif packed:", f"            guarded = {_guarded_expression(spec.operands, optional)}"]
    return lines


def _extend_key(
    key: Any, args: tuple[Any, ...], packed: bool, epilogue: Sequence[BoundStep], out: Any, out_dtype: Any = None
) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """Return the key, ``args`` and ``guarded`` of a call that has an epilogue, an ``out`` or an ``out_dtype``.

    packed: whether the second of ``args`` is a PackedWeight.
    """
    tags: Any = ()
    if epilogue:
        tags = tuple([bound.tag for bound in epilogue])
        args = (*args, *[bound.tensor for bound in epilogue if bound.tensor is not None])
    if out is not None:
        args = (*args, out)
    return (*key, tags, out is None, out_dtype), args, (args[0], *args[2:]) if packed else args


def _parameters(signature: inspect.Signature) -> str:
    """Return the parameters as source text, with ``default_<name>`` for defaults."""
    parts, starred = [], False
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        empty = parameter.default is inspect.Parameter.empty
        parts.append(name if empty else f"{name}=default_{name}")
    return ", ".join(parts)


def _args_lines(operands: tuple[str, ...], optional: list[str]) -> list[str]:
    """Return the lines that set ``args`` to the operands that are not None."""
    required = [name for name in operands if name not in optional]
    whole = f"({', '.join(required)})"
    if len(optional) == 1:
        return [f"    args = {whole} if {optional[0]} is None else ({', '.join([*required, *optional])})"]
    lines = [f"    args = {whole}"]
    for name in optional:
        lines += [f"    if {name} is not None:", f"        args = (*args, {name})"]
    return lines


def _guarded_expression(operands: tuple[str, ...], optional: list[str]) -> str:
    """Return the expression of ``args`` without a PackedWeight, which is the second of them."""
    rest = [name for name in operands if name not in optional]
    del rest[1]
    alone = f"({', '.join(rest)},)"
    if not optional:
        return alone
    if len(optional) == 1:
        return f"{alone} if {optional[0]} is None else ({', '.join([*rest, *optional])})"
    return "(args[0], *args[2:])"


def _is_uniform(miss: CacheMiss) -> bool:
    """Whether the operands have one device and dtype (PyTorch takes fake tensors of others), and nobody records them
    (the arithmetic of a subclass is no Problem)."""
    if miss.key is None or (RUNTIME.observer is not None and not any(map(is_subclass, miss.args))):
        return False
    device, dtype = miss.args[0].device, miss.args[0].dtype
    return all(tensor.device == device and tensor.dtype == dtype for tensor in miss.args[1:])


def _autocast(operands: Arguments) -> Arguments:
    """Return the two operands in autocast's dtype where it is on. (PyTorch sees the multiply of a call with an epilogue
    too late to convert them. A packed weight has one dtype, and calls with ``out`` are not autocast.)"""
    a, b = operands.values()
    if isinstance(b, PackedWeight) or not is_autocast_on(a.device.type):
        return operands
    dtype = torch.get_autocast_dtype(a.device.type)
    return {name: t.to(dtype) if t.dtype in _AUTOCAST_FROM else t for name, t in operands.items()}
