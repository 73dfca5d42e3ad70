"""What the commands share: options, parsing, errors that end in one clear line, and JSON output."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, ParamSpec, TextIO, TypeVar

import typer

from ..core.printable import visible
from .errors import usage

if TYPE_CHECKING:
    from rich.console import Console

    from ..core.problem import Problem
    from ..core.target import Target
    from ..report.layers import Model
    from ..store.base import Store
    from ..timing.clock import Latency

P = ParamSpec("P")
R = TypeVar("R")


def finite(value: float | None) -> float | None:
    """An option's number; NaN and infinities, which no range refuses, are wrong usage."""
    if value is not None and not math.isfinite(value):
        usage(f"{value} is not a finite number")
    return value


HotOption = Annotated[
    bool, typer.Option("--hot", help="Time kernels on operands in the cache instead of cold ones from memory.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
StoreOption = Annotated[
    Path | None, typer.Option("--store", metavar="PATH", help="The store's file [default: $GEMMTUNE_STORE or yours].")
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, max=4096, metavar="N", help="Threads [default: torch's].")
]
BackendsOption = Annotated[
    str | None, typer.Option("--backends", metavar="A,B", help="Backends to use, comma separated [default: all].")
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="D", help="cpu, cuda, or cuda:1 for a certain GPU [default: cpu].")
]
LatencyOption = Annotated[
    str,
    typer.Option(
        "--latency", metavar="L",
        help="On GPUs: rank by time in a CUDA graph (graph), or with launching, as without graphs (eager).",
    ),
]  # fmt: skip
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype", metavar="D", help="fp32, bf16, fp16, fp64, int8 (int8 x int8), int8wo, int4wo, fp8wo or fp8."
    ),
]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        "--budget", min=0.05, max=86400, metavar="S", callback=finite,
        help="Seconds for each problem, kept within 10% [default: 6, more where single calls are slow].",
    ),
]  # fmt: skip


def fail(message: str, *, as_json: bool = False) -> NoReturn:
    """A failure: one line on stderr (or a JSON document on stdout), exit code 1."""
    if as_json:
        emit({"error": message})
    else:
        say(f"error: {message}", file=sys.stderr)
    raise typer.Exit(1)


def say(*lines: str, file: TextIO | None = None) -> None:
    """Print each line on ``file`` (stdout); what is in them acts on no terminal and makes no further lines."""
    for line in lines:
        print(visible(line), file=file, flush=file is not None)


def guard(command: Callable[P, R]) -> Callable[P, R]:
    """Turn the errors users can cause into one line and exit code 1; anything else is a bug and keeps its traceback."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        from ..core.errors import GemmtuneError

        as_json = bool(kwargs.get("as_json", False))
        try:
            return command(*args, **kwargs)
        except GemmtuneError as error:
            fail(str(error), as_json=as_json)
        except OSError as error:
            words = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
            fail(words, as_json=as_json)
        except KeyboardInterrupt:
            fail("interrupted", as_json=as_json)

    return guarded


def emit(document: Any) -> None:
    """Print one JSON document (infinities and NaN as strings, so that any parser reads it)."""
    print(json.dumps(_finite(document), indent=2, default=str))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return repr(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def console() -> Console:
    """The rich console on stdout, for which every string is text."""
    from .terminal import PlainConsole

    return PlainConsole()


@contextlib.contextmanager
def quiet_stdout(active: bool) -> Iterator[None]:
    """Send what others print to stderr while ``active``, so that stdout holds the JSON document alone."""
    with contextlib.redirect_stdout(sys.stderr) if active else contextlib.nullcontext():
        yield


def parse_shape(text: str) -> tuple[int, int, int]:
    """``"M,N,K"`` (or ``MxNxK``) as three non-negative ints; anything else is wrong usage."""
    parts = text.lower().replace("x", ",").split(",")
    try:
        m, n, k = (int(part) for part in parts)
    except ValueError:
        usage(f"a shape is M,N,K, for example 16,4096,11008; got {text!r}")
    if min(m, n, k) < 0:
        usage(f"M, N and K must not be negative; got {text!r}")
    if max(m, n, k) >= 1 << 31:
        usage(f"M, N and K must be below 2^31; got {text!r}")
    return m, n, k


def parse_problem(shape: tuple[int, int, int], dtype: str, *, bias: bool = False) -> Problem:
    """The Problem of a shape and a ``--dtype``; an unknown dtype is wrong usage."""
    from ..core.workloads import build

    try:
        return build(*shape, dtype, bias=bias)
    except ValueError as error:
        usage(str(error))


def parse_device(text: str | None) -> str:
    """A device as torch names it (default ``cpu``); anything but cpu, cuda and cuda:N is wrong usage."""
    kind, colon, index = (text or "cpu").partition(":")
    if kind not in ("cpu", "cuda") or (colon and not (kind == "cuda" and index.isdecimal() and index.isascii())):
        usage(f"a device is cpu, cuda or cuda:N; got {text!r}")
    return f"{kind}:{int(index)}" if colon else kind


def parse_latency(text: str) -> Latency:
    """graph or eager; anything else is wrong usage."""
    if text == "eager":
        return "eager"
    return "graph" if text == "graph" else usage(f"--latency is graph or eager; got {text!r}")


def parse_backends(text: str | None, device: str = "cpu") -> tuple[str, ...]:
    """The backends' names, ATen always among them (it is what everything is compared with)."""
    from ..backends import names

    if text is None:
        return names(device.partition(":")[0])
    asked = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [name for name in asked if name not in names()]
    if unknown or not asked:
        usage(f"unknown backend {', '.join(unknown) or text!r}; known backends: {', '.join(names())}")
    return tuple(dict.fromkeys(["aten", *asked]))


def current_target(threads: int | None, device: str = "cpu") -> Target:
    """This machine's device, after setting torch's thread count when one was asked for."""
    import torch

    from .. import dispatch

    if threads is not None:
        torch.set_num_threads(threads)
    return dispatch.current_target(device)


def tuning_target(threads: int | None, device: str = "cpu") -> Target:
    """``current_target`` for commands that run kernels: more threads than the machine has CPUs are wrong usage."""
    cpus = os.cpu_count() or 1
    if threads is not None and threads > cpus:
        usage(f"--threads {threads}: this machine has {cpus} CPUs")
    target = current_target(threads, device)
    if target.device == "cpu":
        return target
    from ..tuning import api

    return api.tuning_target(device)


def require_room(problems: Sequence[tuple[Problem, int]], target: Target) -> None:
    """Refuse problems whose operands cannot fit into the machine, before anything is tuned. Raises UnsupportedError."""
    from ..core.errors import UnsupportedError
    from ..core.workloads import label

    for problem, _ in problems:
        if 0 < target.memory < problem.min_bytes:
            needs, has = problem.min_bytes / (1 << 30), target.memory / (1 << 30)
            place = "this machine" if target.device == "cpu" else f"the {target.name}"
            raise UnsupportedError(f"{label(problem)} needs {needs:,.1f} GiB for its operands; {place} has {has:.1f}")


def require_file(path: Path) -> None:
    """Raise GemmtuneError when something else than a regular file is there: pipes block, devices would be replaced."""
    from ..core.errors import GemmtuneError

    if path.exists() and not path.is_file():
        raise GemmtuneError(f"{path} is not a regular file")


@contextlib.contextmanager
def opened(path: Path | None) -> Iterator[Store]:
    """The store at ``path`` (or the default one), closed afterwards. Raises StoreError when the file cannot be read.

    The library goes on without a store that it cannot read; a command was asked for it, and says so before it works.
    """
    from ..core.errors import StoreError
    from ..store import default_path, open_store

    try:
        store = open_store(path or default_path())  # never one in memory instead, which would keep nothing
    except RuntimeError as error:  # ~somebody, who has no home here
        raise StoreError(f"cannot find the store: {error}") from error
    try:
        place = getattr(store, "path", None)
        if place is not None and os.path.exists(place) and not os.path.isfile(place):
            raise StoreError(f"cannot read the store {place}: it is not a regular file; choose another with --store")
        store.check()
        yield store
    finally:
        store.close()


def require_whole(store: Store, *, as_json: bool) -> None:
    """Leave with exit code 1 when reading the store met damage: what was shown or written is not all that it holds.

    JSON documents list the damage themselves.
    """
    if not store.damage:
        return
    if not as_json:
        more = f"; and {len(store.damage) - 3} more" if len(store.damage) > 3 else ""
        say(
            f"error: parts of the store are not read: {'; '.join(store.damage[:3])}{more} (`gemmtune store verify` "
            "lists the damage)", file=sys.stderr
        )  # fmt: skip
    raise typer.Exit(1)


def collect(
    model: str | None, shapes: Sequence[str], workload: str | None, dtype: str | None, *, bias: bool = False
) -> list[tuple[Problem, int]]:
    """The problems asked for, from exactly one of: a model, ``--workload``, shapes; empty ones left out."""
    chosen = [name for name, given in (("a model", model), ("--workload", workload), ("shapes", shapes)) if given]
    if len(chosen) != 1:
        given = " and ".join(chosen) or "nothing"
        usage(f"give one of: a model (file.py:factory), --workload NAME, or shapes M,N,K; got {given}")
    if model:
        from .models import record_calls

        found = record_calls(model, dtype).recording.problems
    elif workload:
        found = _named(workload, dtype or "bf16")
    else:
        found = [(parse_problem(parse_shape(shape), dtype or "bf16", bias=bias), 1) for shape in shapes]
    return [(problem, count) for problem, count in found if problem.flops > 0]


class Group(NamedTuple):
    """Problems to tune on one device, with call counts. layers: a model's, by module."""

    place: str
    problems: list[tuple[Problem, int]]
    layers: Model | None = None


def gather(
    model: str | None,
    shapes: Sequence[str],
    workload: str | None,
    dtype: str | None,
    *,
    bias: bool = False,
    device: str | None = None,
) -> list[Group]:
    """What ``collect`` finds, by device: a model's problems go where they ran, unless a device is named."""
    if not model or shapes or workload:
        return [Group(parse_device(device), collect(model, shapes, workload, dtype, bias=bias))]
    from .models import record_calls

    place = None if device is None else parse_device(device)
    recorded = record_calls(model, dtype)
    if place is not None:
        return [Group(place, recorded.recording.problems, recorded.layers())]
    ran = [place for place in recorded.recording.devices if place.type in ("cpu", "cuda")]
    return [Group(str(place), recorded.recording.on(place), recorded.layers(place)) for place in ran]


def _named(name: str, dtype: str) -> list[tuple[Problem, int]]:
    from ..core import workloads

    try:
        return workloads.workload(name, dtype)
    except ValueError as error:
        usage(str(error))
