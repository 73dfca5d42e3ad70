"""Loading a user's model for ``gemmtune tune file.py:factory``, and recording its matrix multiplies.

The factory is called with ``dtype=...`` if ``--dtype`` is given, else without arguments. dtype is a ``torch.dtype``. If
the factory's parameter is annotated ``str`` or has a string as its default, dtype is the option's text instead
(``int8wo``, ``int4wo`` and ``fp8wo`` have no torch.dtype).

The factory returns ``(model, example_inputs)``. The model is a callable, usually an ``nn.Module``. The example inputs
are those of ``gemmtune.tune``: a tensor, a tuple of arguments or a dict of keyword arguments, or a list of these if
several calls should be recorded (a prefill and a decode step, for example).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import GemmtuneError
from .usage import fail_usage

if TYPE_CHECKING:
    import torch

    from ..ops.record import Recording
    from ..report.layers import Model

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


def find_factory(spec: str) -> Callable[..., Any]:
    """Return the callable named by ``file.py:factory`` or ``package.module:factory``.

    Exit with wrong usage if it does not exist. Raises GemmtuneError if importing its module fails.
    """
    module_name, colon, name = spec.rpartition(":")
    if not colon or not module_name or not name:
        fail_usage(f"a model is file.py:factory or package.module:factory; got {spec!r}")
    module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_package(module_name)
    factory = getattr(module, name, None)
    if not callable(factory):
        fail_usage(f"{module_name} has no callable named {name!r}")
    typed_factory: Callable[..., Any] = factory
    return typed_factory


def _import_file(path: Path) -> Any:
    if not path.is_file():
        fail_usage(f"no such file: {path}")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    if module_spec is None or module_spec.loader is None:
        fail_usage(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    # As with `python file.py`: the file may import modules from its directory, and its dataclasses find their module.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules.setdefault(path.stem, module)
    _run_import(str(path), functools.partial(module_spec.loader.exec_module, module))
    return module


def _import_package(name: str) -> Any:
    sys.path.insert(0, "")
    return _run_import(name, lambda: importlib.import_module(name))


def _run_import(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (Exception, SystemExit) as error:  # the user's module may raise anything at all
        raise GemmtuneError(f"importing {name} raised {type(error).__name__}: {error}") from error


def call_factory(factory: Callable[..., Any], dtype: str | None) -> tuple[Callable[..., Any], Calls]:
    """Return the model and the arguments of each call.

    Raises GemmtuneError if the factory raises, or returns anything else than ``(model, example_inputs)``.
    """
    name = getattr(factory, "__name__", repr(factory))  # a partial has none
    options = {} if dtype is None else {"dtype": _dtype_for(factory, name, dtype)}
    try:
        result = factory(**options)
    except (Exception, SystemExit) as error:  # the user's code may raise anything at all
        raise GemmtuneError(f"{name} raised {type(error).__name__}: {error}") from error
    if not (isinstance(result, tuple) and len(result) == 2 and callable(result[0])):
        raise GemmtuneError(f"{name} must return (model, example_inputs); got {type(result).__name__}")
    from ..ops.calls import as_calls

    model, inputs = result
    try:
        return model, as_calls(inputs)
    except (TypeError, ValueError) as error:
        raise GemmtuneError(f"{name}: {error}") from error


def _dtype_for(factory: Callable[..., Any], name: str, dtype: str) -> Any:
    """Return the value to pass to the factory as ``dtype``: a torch.dtype, or the option's text.

    Exit with wrong usage if the factory takes no dtype, or if the text is unknown or has no torch.dtype.
    """
    import torch

    from ..core.workloads import DTYPES, TORCH_DTYPES

    try:
        parameter = inspect.signature(factory).parameters.get("dtype")
    except ValueError:  # some builtins have none
        parameter = None
    if parameter is None:
        fail_usage(f"{name} takes no dtype, so --dtype cannot apply to this model")
    if dtype not in DTYPES:
        fail_usage(f"unknown dtype {dtype!r}; known dtypes: {', '.join(DTYPES)}")
    if isinstance(parameter.default, str) or parameter.annotation in (str, "str", "'str'"):
        return dtype
    if dtype not in TORCH_DTYPES:
        fail_usage(
            f"{name} takes a torch.dtype, and {dtype} is none ({', '.join(TORCH_DTYPES)} are); annotate its dtype as "
            "str to be given the name"
        )
    return getattr(torch, TORCH_DTYPES[dtype])


class Recorded(NamedTuple):
    """The recorded multiplies of a model's example calls. inputs: a description of each call's tensors."""

    recording: Recording
    inputs: tuple[str, ...]

    def layers(self, device: torch.device | None = None) -> Model:
        """Return which modules ran which problems in which call, on one device or (None) on all."""
        from ..report.layers import Model, Use

        uses = self.recording.places(device)
        return Model(self.inputs, tuple(Use(call, layer, p.key, count) for (call, layer), p, count in uses))


def record_calls(spec: str, dtype: str | None) -> Recorded:
    """Run a model's example calls and return the recorded multiplies.

    Raises GemmtuneError if a call raises, or if no call runs a multiply that gemmtune knows.
    """
    model, calls = call_factory(find_factory(spec), dtype)
    import torch

    from ..ops.record import record

    if isinstance(model, torch.nn.Module):
        model.eval()
    recorder = record()
    # Entered before the recorder: global module hooks run in the order in which they were registered.
    with _track_modules(model, recorder.recording), torch.inference_mode(), recorder as recorded:
        for index, (args, kwargs) in enumerate(calls):
            recorded.where = (index, "")
            try:
                model(*args, **kwargs)
            except (Exception, SystemExit) as error:  # the user's forward may raise anything at all
                raise GemmtuneError(f"running {spec} raised {type(error).__name__}: {error}") from error
    if not len(recorded):
        raise GemmtuneError(f"{spec} ran no matrix multiply that gemmtune knows")
    return Recorded(recorded, tuple(_describe_arguments((*args, *kwargs.values())) for args, kwargs in calls))


@contextlib.contextmanager
def _track_modules(model: Callable[..., Any], recording: Recording) -> Iterator[None]:
    """Set ``recording.where`` to the module of the model that runs, in a with block."""
    import torch
    from torch.nn.modules import module as hooks

    module_names = {part: name for name, part in model.named_modules()} if isinstance(model, torch.nn.Module) else {}
    outer: list[tuple[int, str]] = []

    def before(module: torch.nn.Module, args: Any) -> None:
        if module in module_names:
            outer.append(recording.where)
            recording.where = (recording.where[0], module_names[module])

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        if module in module_names and outer:
            recording.where = outer.pop()

    handles = (
        hooks.register_module_forward_pre_hook(before),
        hooks.register_module_forward_hook(after, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _describe_arguments(args: tuple[Any, ...]) -> str:
    """Return a description of a call's tensors, at most four: ``int64 [1, 64], float32 [8]``."""
    import torch

    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    descriptions = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors[:4]]
    return ", ".join([*descriptions, "..."] if len(tensors) > 4 else descriptions) or "no tensors"
