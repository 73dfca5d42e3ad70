"""Options, parsers, error handling and output that the commands share."""

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
from .usage import fail_usage

if TYPE_CHECKING:
    from rich.console import Console

    from ..core.problem import Problem
    from ..core.target import Target
    from ..report.layers import Model
    from ..store.base import Store
    from ..timing.clock import Latency

P = ParamSpec("P")
R = TypeVar("R")


def require_finite(value: float | None) -> float | None:
    """Return a numeric option's value. Exit with wrong usage for NaN and infinities, which typer's ranges accept."""
    if value is not None and not math.isfinite(value):
        fail_usage(f"{value} is not a finite number")
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
    str, typer.Option("--dtype", metavar="D", help="fp32, bf16, fp16, fp64, int8, int8wo, int4wo, fp8wo or fp8.")
]
WorkloadOption = Annotated[
    str | None, typer.Option("--workload", metavar="NAME", help="llama, llama-small, odd or dynamic.")
]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        "--budget", min=0.05, max=86400, metavar="S", callback=require_finite,
        help="Seconds for each problem, kept within 10% [default: 6, more where single calls are slow].",
    ),
]  # fmt: skip


def fail(message: str, *, as_json: bool = False) -> NoReturn:
    """Print an error message and exit with code 1. The message is one line on stderr, or a JSON document on stdout."""
    if as_json:
        print_json({"error": message})
    else:
        print_lines(f"error: {message}", file=sys.stderr)
    raise typer.Exit(1)


def print_lines(*lines: str, file: TextIO | None = None) -> None:
    """Print each line to ``file`` (default: stdout).

    Control characters and line breaks within a line are escaped, so that they neither control the terminal nor add
    lines.
    """
    for line in lines:
        print(visible(line), file=file, flush=file is not None)


def exit_on_error(command: Callable[P, R]) -> Callable[P, R]:
    """Return the command with errors that users can cause turned into a one-line message and exit code 1.

    These are GemmtuneError, OSError and KeyboardInterrupt. Any other exception is a bug and keeps its traceback.
    """

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        from ..core.errors import GemmtuneError

        as_json = bool(kwargs.get("as_json", False))
        try:
            return command(*args, **kwargs)
        except GemmtuneError as error:
            fail(str(error), as_json=as_json)
        except OSError as error:
            message = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
            fail(message, as_json=as_json)
        except KeyboardInterrupt:
            fail("interrupted", as_json=as_json)

    return guarded


def print_json(document: Any) -> None:
    """Print one JSON document. Infinities and NaN are written as strings, so that any parser can read it."""
    print(json.dumps(_json_ready(document), indent=2, default=str))


def _json_ready(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return repr(value)
    if isinstance(value, dict):
        return {str(key): _json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    return value


def plain_console() -> Console:
    """Return a rich console on stdout that prints strings literally, without interpreting markup."""
    from .terminal import PlainConsole

    return PlainConsole()


@contextlib.contextmanager
def quiet_stdout(active: bool) -> Iterator[None]:
    """Redirect stdout to stderr in a with block if ``active``, so that stdout has only the JSON document."""
    with contextlib.redirect_stdout(sys.stderr) if active else contextlib.nullcontext():
        yield


def parse_shape(text: str) -> tuple[int, int, int]:
    """Return M, N and K from ``"M,N,K"`` or ``"MxNxK"``.

    Exit with wrong usage unless they are three integers from 0 to 2^31 - 1.
    """
    parts = text.lower().replace("x", ",").split(",")
    try:
        m, n, k = (int(part) for part in parts)
    except ValueError:
        fail_usage(f"a shape is M,N,K, for example 16,4096,11008; got {text!r}")
    if min(m, n, k) < 0:
        fail_usage(f"M, N and K must not be negative; got {text!r}")
    if max(m, n, k) >= 1 << 31:
        fail_usage(f"M, N and K must be below 2^31; got {text!r}")
    return m, n, k


def parse_problem(shape: tuple[int, int, int], dtype: str, *, bias: bool = False) -> Problem:
    """Return the Problem of a shape and a ``--dtype``. Exit with wrong usage for an unknown dtype."""
    from ..core.workloads import build

    try:
        return build(*shape, dtype, bias=bias)
    except ValueError as error:
        fail_usage(str(error))


def parse_device(text: str | None) -> str:
    """Return the device as torch names it: cpu (default), cuda or cuda:N. Exit with wrong usage for any other text."""
    from ..core import devices

    device_type, colon, index = (text or "cpu").partition(":")
    is_known = device_type in devices.names()
    is_index = index.isdecimal() and index.isascii() and is_known and not devices.is_host(device_type)
    if not is_known or (colon and not is_index):
        fail_usage(f"a device is {', '.join(devices.names())} or cuda:N; got {text!r}")
    return f"{device_type}:{int(index)}" if colon else device_type


def parse_latency(text: str) -> Latency:
    """Return ``"graph"`` or ``"eager"``. Exit with wrong usage for any other text."""
    if text == "eager":
        return "eager"
    return "graph" if text == "graph" else fail_usage(f"--latency is graph or eager; got {text!r}")


def parse_backends(text: str | None, device: str = "cpu") -> tuple[str, ...]:
    """Return the names of the requested backends (default: all of the device's).

    ATen is always among them, because its candidates are the baseline. Exit with wrong usage for an unknown name.
    """
    from ..backends import names

    if text is None:
        return names(device.partition(":")[0])
    requested = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [name for name in requested if name not in names()]
    if unknown or not requested:
        fail_usage(f"unknown backend {', '.join(unknown) or text!r}; known backends: {', '.join(names())}")
    return tuple(dict.fromkeys(["aten", *requested]))


def selected_target(threads: int | None, device: str = "cpu") -> Target:
    """Set torch's number of threads to ``threads`` if given, and return the Target of a device of this machine."""
    import torch

    from .. import dispatch

    if threads is not None:
        torch.set_num_threads(threads)
    return dispatch.current_target(device)


def selected_tuning_target(threads: int | None, device: str = "cpu") -> Target:
    """Return the Target for a command that times kernels. Exit with wrong usage for more threads than CPUs."""
    cpus = os.cpu_count() or 1
    if threads is not None and threads > cpus:
        fail_usage(f"--threads {threads}: this machine has {cpus} CPUs")
    target = selected_target(threads, device)
    if target.is_cpu:
        return target
    from ..tuning import api

    return api.tuning_target(device)


def require_memory(problems: Sequence[tuple[Problem, int]], target: Target) -> None:
    """Raise UnsupportedError if the operands of a problem do not fit into the target's memory."""
    from ..core.errors import UnsupportedError
    from ..core.workloads import label

    for problem, _ in problems:
        if 0 < target.memory < problem.min_bytes:
            required_gib, available_gib = problem.min_bytes / (1 << 30), target.memory / (1 << 30)
            owner = "this machine" if target.is_cpu else f"the {target.name}"
            raise UnsupportedError(
                f"{label(problem)} needs {required_gib:,.1f} GiB for its operands; {owner} has {available_gib:.1f}"
            )


def require_file(path: Path) -> None:
    """Raise GemmtuneError if ``path`` exists and is not a regular file: a pipe would block, a device be replaced."""
    from ..core.errors import GemmtuneError

    if path.exists() and not path.is_file():
        raise GemmtuneError(f"{path} is not a regular file")


@contextlib.contextmanager
def checked_store(path: Path | None) -> Iterator[Store]:
    """Open the store at ``path`` (default: the default store) for a with block, and close it afterwards.

    Raises StoreError if the file cannot be read. The library continues without a store that it cannot read, but a
    command's user asked for this store, so the command fails before it does any work.
    """
    from ..core.errors import StoreError
    from ..store import default_path, open_store

    try:
        store = open_store(path or default_path())  # never a store in memory instead, whose decisions would be lost
    except RuntimeError as error:  # from a path such as ~user, for a user without a home directory
        raise StoreError(f"cannot find the store: {error}") from error
    try:
        location = getattr(store, "path", None)
        if location is not None and os.path.exists(location) and not os.path.isfile(location):
            raise StoreError(f"cannot read the store {location}: it is not a regular file; choose another with --store")
        store.check()
        yield store
    finally:
        store.close()


def exit_if_damaged(store: Store, *, as_json: bool) -> None:
    """Exit with code 1 if parts of the store could not be read: the output of the command is then incomplete.

    The damage is printed on stderr, unless ``as_json``: JSON documents list it themselves.
    """
    if not store.damage:
        return
    if not as_json:
        more = f"; and {len(store.damage) - 3} more" if len(store.damage) > 3 else ""
        print_lines(
            f"error: parts of the store are not read: {'; '.join(store.damage[:3])}{more} (`gemmtune store verify` "
            "lists the damage)", file=sys.stderr
        )  # fmt: skip
    raise typer.Exit(1)


def requested_problems(
    model: str | None, shapes: Sequence[str], workload: str | None, dtype: str | None, *, bias: bool = False
) -> list[tuple[Problem, int]]:
    """Return the requested problems with their call counts. Problems in which a size is 0 are left out.

    Exit with wrong usage unless exactly one source is given: a model, a workload or shapes.
    """
    sources = [name for name, value in (("a model", model), ("--workload", workload), ("shapes", shapes)) if value]
    if len(sources) != 1:
        text = " and ".join(sources) or "nothing"
        fail_usage(f"give one of: a model (file.py:factory), --workload NAME, or shapes M,N,K; got {text}")
    if model:
        from .models import record_calls

        problems = record_calls(model, dtype).recording.problems
    elif workload:
        problems = _workload_problems(workload, dtype or "bf16")
    else:
        problems = [(parse_problem(parse_shape(shape), dtype or "bf16", bias=bias), 1) for shape in shapes]
    return [(problem, count) for problem, count in problems if problem.flops > 0]


class DeviceProblems(NamedTuple):
    """The problems to tune on one device, with their call counts.

    device: as torch names it. layers: which modules of a model run which problems; None without a model.
    """

    device: str
    problems: list[tuple[Problem, int]]
    layers: Model | None = None


def problems_by_device(
    model: str | None,
    shapes: Sequence[str],
    workload: str | None,
    dtype: str | None,
    *,
    bias: bool = False,
    device: str | None = None,
) -> list[DeviceProblems]:
    """Return the requested problems (see ``requested_problems``) grouped by device.

    A model's problems are tuned for the devices that they ran on, unless ``device`` names one.
    """
    if not model or shapes or workload:
        return [DeviceProblems(parse_device(device), requested_problems(model, shapes, workload, dtype, bias=bias))]
    from ..core import devices
    from .models import record_calls

    requested = None if device is None else parse_device(device)
    recorded = record_calls(model, dtype)
    if requested is not None:
        return [DeviceProblems(requested, recorded.recording.problems, recorded.layers())]
    used = [each for each in recorded.recording.devices if devices.is_served(each)]
    return [DeviceProblems(str(each), recorded.recording.on(each), recorded.layers(each)) for each in used]


def _workload_problems(name: str, dtype: str) -> list[tuple[Problem, int]]:
    from ..core import workloads

    try:
        return workloads.workload(name, dtype)
    except ValueError as error:
        fail_usage(str(error))
