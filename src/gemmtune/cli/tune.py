"""``gemmtune tune``: find and keep the fastest correct kernel for each problem."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import (
    BackendsOption,
    BudgetOption,
    DeviceOption,
    HotOption,
    JsonOption,
    LatencyOption,
    StoreOption,
    ThreadsOption,
    console,
    emit,
    fail,
    gather,
    guard,
    opened,
    parse_backends,
    parse_latency,
    quiet_stdout,
    require_room,
    say,
    tuning_target,
)

if TYPE_CHECKING:
    from ..core.problem import Problem
    from ..core.target import Target
    from ..report.layers import Model
    from ..store.base import Store
    from ..timing.clock import Latency
    from .progress import Board


@guard
def tune(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL|M,N,K", help="file.py:factory, package.module:factory, or shapes."),
    ] = None,
    workload: Annotated[
        str | None, typer.Option("--workload", metavar="NAME", help="llama, llama-small, odd or dynamic.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="D", help="fp32, bf16 [default], fp16, fp64, int8, int8wo, int4wo, fp8wo, fp8."
        ),
    ] = None,
    bias: Annotated[bool, typer.Option("--bias", help="With shapes: add a bias of N.")] = False,
    backends: BackendsOption = None,
    budget: BudgetOption = None,
    hot: HotOption = False,
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    latency: LatencyOption = "graph",
    force: Annotated[bool, typer.Option("--force", help="Tune again what the store already answers.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tune a model's, a workload's or the given matrix multiplies, and keep the decisions in the store.

    A factory returns (model, example_inputs): the arguments of one call as a tuple, or a list of such tuples.
    Without --device a model's multiplies are tuned for where they ran. Ctrl-C keeps what is finished.
    """
    model, shapes = split_what(what or [])
    ranked = parse_latency(latency)
    parse_backends(backends)  # what is wrong is said before a model runs
    with quiet_stdout(as_json):
        gathered = gather(model, shapes, workload, dtype, bias=bias, device=device)
        groups = [
            (tuning_target(threads, place), problems, parse_backends(backends, place))
            for place, problems, _ in gathered
        ]
    if shapes:  # a workload's or a model's other problems are worth tuning in any case
        require_room(groups[0][1], groups[0][0])
    asked = sum(len(problems) for _, problems, _ in groups)
    if not asked:
        fail("every one of these problems is empty (M, N or K is 0): there is nothing to tune", as_json=as_json)
    board, interrupted = None, False
    with opened(store) as keeper:
        if force or any(keeper.get(target, p.key) is None for target, problems, _ in groups for p, _ in problems):
            keeper.check_writable()  # before the search, whose decisions would be lost
        for (target, problems, names), group in zip(groups, gathered, strict=True):
            board, interrupted = run(
                problems, target, names, keeper,
                budget=budget, force=force, hot=hot, hidden=as_json, latency=ranked, board=board,
            )  # fmt: skip
            remember_ceilings(keeper, target)
            remember_layers(keeper, target, model, group.layers)
            if interrupted:
                break
    assert board is not None
    report_outcome(board, asked, interrupted, as_json=as_json)


def split_what(what: Sequence[str]) -> tuple[str | None, list[str]]:
    """A model spec has a colon, a shape has none."""
    models = [text for text in what if ":" in text]
    shapes = [text for text in what if ":" not in text]
    return (models[0], [*models[1:], *shapes]) if models else (None, shapes)


def run(
    problems: Sequence[tuple[Problem, int]],
    target: Target,
    names: Sequence[str],
    store: Store,
    *,
    budget: float | None,
    force: bool = False,
    hot: bool = False,
    hidden: bool = False,
    latency: Latency = "graph",
    board: Board | None = None,
) -> tuple[Board, bool]:
    """Tune with the progress display; returns what finished (on ``board``, when one is given) and whether Ctrl-C
    ended it."""
    from ..tuning.tuner import Budget, Tuner
    from .progress import Board, watching

    board = board or Board()
    with watching(board, hidden=hidden) as progress:
        tuner = Tuner(
            target, names, store, Budget(seconds=budget), progress=progress, force=force, hot=hot, latency=latency
        )
        try:
            tuner.tune(problems)
        except KeyboardInterrupt:
            return board, True
        finally:
            board.unstored += len(tuner.unstored)
            board.store_error = tuner.store_error or board.store_error
    return board, False


def remember_ceilings(store: Store, target: Target) -> None:
    """Measure the machine's ceilings once per target, so that the report can draw its roofline from the store alone.

    Only of CPUs: what reads memory and multiplies there says nothing of a GPU.
    """
    from ..report import ceilings

    if target.device != "cpu":
        return
    path = ceilings.beside(store)
    if path is not None:
        ceilings.ensure(path, target)


def remember_layers(store: Store, target: Target, model: str | None, found: Model | None) -> None:
    """Keep which layers run what, so that the report can say what a forward saves."""
    from ..report import layers

    path = layers.beside(store)
    if path is not None and model is not None and found is not None:
        layers.remember(path, model, target.key, found)


def report_outcome(board: Board, asked: int, interrupted: bool, *, as_json: bool) -> None:
    """Print the table (or the JSON document) and leave with the right code."""
    failed = [decision for decision in board.decisions if decision.outcome == "none_valid"]
    if as_json:
        emit(outcome_document(board, interrupted))
    else:
        print_outcome(board, asked, interrupted)
    if interrupted or failed or board.unstored:
        raise typer.Exit(1)


def outcome_document(board: Board, interrupted: bool) -> dict[str, Any]:
    """The whole outcome as JSON-ready data. not_kept: decisions that the store did not take; why, in store_error."""
    from ..report.rows import ordered, summarize

    rows = []
    for decision in ordered(board.decisions):
        row = summarize(decision)
        rows.append(
            {
                "problem": decision.problem_key,
                "label": row.label,
                "outcome": row.outcome,
                "kernel": decision.chosen,
                "aten_s": row.aten_s,
                "best_s": row.best_s,
                "speedup": row.speedup,
                "speedup_lo": row.lo,
                "speedup_hi": row.hi,
                "seconds": row.seconds,
            }
        )
    kept = {} if not board.unstored else {"not_kept": board.unstored, "store_error": board.store_error}
    return {"interrupted": interrupted, "from_store": board.cached, **kept, "decisions": rows}


def print_outcome(board: Board, asked: int, interrupted: bool) -> None:
    from ..tuning.tuner import inconclusive_summary
    from .tables import decisions_table

    out = console()
    if board.decisions:
        out.print()
        out.print(decisions_table(board.decisions))
    if words := inconclusive_summary(board.decisions):
        say(words, file=sys.stderr)
    if interrupted:
        kept = sum(decision.outcome != "inconclusive" for decision in board.decisions) - board.unstored
        say(f"interrupted: {kept} of {asked} problems are decided and kept in the store", file=sys.stderr)
    if board.unstored:
        say(f"error: {board.unstored} of {asked} decisions are not kept: {board.store_error}", file=sys.stderr)
