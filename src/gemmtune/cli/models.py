"""Loading a user's model for ``gemmtune tune file.py:factory``.

The factory is called with ``dtype=...`` when ``--dtype`` is given, else with nothing. dtype is a ``torch.dtype``; a
factory whose parameter is annotated ``str``, or is a string by default, has the name that was typed instead
(``int8wo``, ``int4wo`` and ``fp8wo`` are no torch.dtype). It returns ``(model, example_inputs)``: a callable (usually
an ``nn.Module``) and the arguments of a call as a tuple, or a list of such tuples when several calls should be recorded
(prefill and decode, say).
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
from .errors import usage

if TYPE_CHECKING:
    import torch

    from ..ops.record import Recording
    from ..report.layers import Model

Calls = list[tuple[Any, ...]]


def find_factory(spec: str) -> Callable[..., Any]:
    """The callable named by ``file.py:factory`` or ``package.module:factory``; wrong usage when there is none."""
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        usage(f"a model is file.py:factory or package.module:factory; got {spec!r}")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_package(place)
    factory = getattr(module, name, None)
    if not callable(factory):
        usage(f"{place} has no callable named {name!r}")
    found: Callable[..., Any] = factory
    return found


def _from_file(path: Path) -> Any:
    if not path.is_file():
        usage(f"no such file: {path}")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    if module_spec is None or module_spec.loader is None:
        usage(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    # As with `python file.py`: the file may import its neighbours, and its dataclasses find their module.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules.setdefault(path.stem, module)
    _importing(str(path), functools.partial(module_spec.loader.exec_module, module))
    return module


def _from_package(name: str) -> Any:
    sys.path.insert(0, "")
    return _importing(name, lambda: importlib.import_module(name))


def _importing(what: str, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except (Exception, SystemExit) as error:  # the user's module may raise anything at all
        raise GemmtuneError(f"importing {what} raised {type(error).__name__}: {error}") from error


def call_factory(factory: Callable[..., Any], dtype: str | None) -> tuple[Callable[..., Any], Calls]:
    """The model and the argument tuples to call it with. Raises GemmtuneError when the factory fails or misleads."""
    name = getattr(factory, "__name__", repr(factory))  # a partial has none
    options = {} if dtype is None else {"dtype": _dtype_for(factory, name, dtype)}
    try:
        made = factory(**options)
    except (Exception, SystemExit) as error:  # the user's code may raise anything at all
        raise GemmtuneError(f"{name} raised {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise GemmtuneError(f"{name} must return (model, example_inputs); got {type(made).__name__}")
    model, inputs = made
    calls = inputs if isinstance(inputs, list) else [inputs]
    return model, [call if isinstance(call, tuple) else (call,) for call in calls]


def _dtype_for(factory: Callable[..., Any], name: str, dtype: str) -> Any:
    """What the factory takes for ``--dtype``: a torch.dtype, or the name itself. Wrong usage when there is neither."""
    import torch

    from ..core.workloads import DTYPES, TORCH_DTYPES

    try:
        parameter = inspect.signature(factory).parameters.get("dtype")
    except ValueError:  # some builtins have none
        parameter = None
    if parameter is None:
        usage(f"{name} takes no dtype, so --dtype cannot apply to this model")
    if dtype not in DTYPES:
        usage(f"unknown dtype {dtype!r}; known dtypes: {', '.join(DTYPES)}")
    if isinstance(parameter.default, str) or parameter.annotation in (str, "str", "'str'"):
        return dtype
    if dtype not in TORCH_DTYPES:
        usage(
            f"{name} takes a torch.dtype, and {dtype} is none ({', '.join(TORCH_DTYPES)} are); annotate its dtype as "
            "str to be given the name"
        )
    return getattr(torch, TORCH_DTYPES[dtype])


class Recorded(NamedTuple):
    """What a model's example calls ran, and each call's arguments in words."""

    recording: Recording
    inputs: tuple[str, ...]

    def layers(self, device: torch.device | None = None) -> Model:
        """Which modules ran which problems in which call, on one device or on all."""
        from ..report.layers import Model, Use

        places = self.recording.places(device)
        return Model(self.inputs, tuple(Use(call, layer, p.key, count) for (call, layer), p, count in places))


def record_calls(spec: str, dtype: str | None) -> Recorded:
    """What the model's example calls run, and where. Raises GemmtuneError when that is nothing."""
    model, calls = call_factory(find_factory(spec), dtype)
    import torch

    from ..ops.record import record

    if isinstance(model, torch.nn.Module):
        model.eval()
    recorder = record()
    # Before the recorder's own hooks, which run in this order.
    with _naming(model, recorder.recording), torch.inference_mode(), recorder as recorded:
        for index, call in enumerate(calls):
            recorded.where = (index, "")
            try:
                model(*call)
            except (Exception, SystemExit) as error:  # the user's forward may raise anything at all
                raise GemmtuneError(f"running {spec} raised {type(error).__name__}: {error}") from error
    if not len(recorded):
        raise GemmtuneError(f"{spec} ran no matrix multiply that gemmtune knows")
    return Recorded(recorded, tuple(_in_words(call) for call in calls))


@contextlib.contextmanager
def _naming(model: Callable[..., Any], recording: Recording) -> Iterator[None]:
    """A block in which the recording is told which module of the model runs."""
    import torch
    from torch.nn.modules import module as hooks

    names = {part: name for name, part in model.named_modules()} if isinstance(model, torch.nn.Module) else {}
    former: list[tuple[int, str]] = []

    def before(module: torch.nn.Module, args: Any) -> None:
        if module in names:
            former.append(recording.where)
            recording.where = (recording.where[0], names[module])

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        if module in names and former:
            recording.where = former.pop()

    handles = (
        hooks.register_module_forward_pre_hook(before),
        hooks.register_module_forward_hook(after, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _in_words(call: tuple[Any, ...]) -> str:
    """The tensors among a call's arguments: ``int64 [1, 64], float32 [8]``; at most four."""
    import torch

    tensors = [value for value in call if isinstance(value, torch.Tensor)]
    words = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors[:4]]
    return ", ".join([*words, "..."] if len(tensors) > 4 else words) or "no tensors"
