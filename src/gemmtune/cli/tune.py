"""``gemmtune tune``: find and keep the fastest correct kernel for each problem."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import (
    BackendsOption,
    BudgetOption,
    HotOption,
    JsonOption,
    StoreOption,
    ThreadsOption,
    collect,
    console,
    emit,
    fail,
    guard,
    opened,
    parse_backends,
    quiet_stdout,
    require_room,
    tuning_target,
)

if TYPE_CHECKING:
    from ..decision import Decision
    from ..problem import Problem
    from ..store.base import Store
    from ..target import Target
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
        typer.Option("--dtype", metavar="D", help="fp32, bf16 [default], fp16, fp64, int8, int8wo, int4wo."),
    ] = None,
    bias: Annotated[bool, typer.Option("--bias", help="With shapes: add a bias of N.")] = False,
    backends: BackendsOption = None,
    budget: BudgetOption = None,
    hot: HotOption = False,
    threads: ThreadsOption = None,
    force: Annotated[bool, typer.Option("--force", help="Tune again what the store already answers.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tune a model's, a workload's or the given matrix multiplies, and keep the decisions in the store.

    A factory returns (model, example_inputs): the arguments of one call as a tuple, or a list of such tuples.
    Ctrl-C keeps what is finished.
    """
    model, shapes = split_what(what or [])
    names = parse_backends(backends)
    with quiet_stdout(as_json):
        problems = collect(model, shapes, workload, dtype, bias=bias)
        target = tuning_target(threads)
    if shapes:  # a workload's or a model's other problems are worth tuning in any case
        require_room(problems, target)
    if not problems:
        fail("every one of these problems is empty (M, N or K is 0): there is nothing to tune", as_json=as_json)
    with opened(store) as keeper:
        board, interrupted = run(problems, target, names, keeper, budget=budget, force=force, hot=hot, hidden=as_json)
        remember_ceilings(keeper, target)
    report_outcome(board, len(problems), interrupted, as_json=as_json)


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
) -> tuple[Board, bool]:
    """Tune with the progress display; returns what finished and whether Ctrl-C ended it."""
    from ..tuner import Budget, Tuner
    from .progress import Board, watching

    board = Board()
    with watching(board, hidden=hidden) as progress:
        tuner = Tuner(target, names, store, Budget(seconds=budget), progress=progress, force=force, hot=hot)
        try:
            tuner.tune(problems)
        except KeyboardInterrupt:
            return board, True
    return board, False


def remember_ceilings(store: Store, target: Target) -> None:
    """Measure the machine's ceilings once per target, so that the report can draw its roofline from the store alone."""
    from ..report import ceilings

    path = ceilings.beside(store)
    if path is not None:
        ceilings.ensure(path, target)


def report_outcome(board: Board, asked: int, interrupted: bool, *, as_json: bool) -> None:
    """Print the table (or the JSON document) and leave with the right code."""
    failed = [decision for decision in board.decisions if decision.outcome == "none_valid"]
    if as_json:
        emit(outcome_document(board.decisions, board.cached, interrupted))
    else:
        print_outcome(board, asked, interrupted)
    if interrupted or failed:
        raise typer.Exit(1)


def outcome_document(decisions: Sequence[Decision], cached: int, interrupted: bool) -> dict[str, Any]:
    """The whole outcome as JSON-ready data."""
    from ..report.rows import ordered, summarize

    rows = []
    for decision in ordered(decisions):
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
    return {"interrupted": interrupted, "from_store": cached, "decisions": rows}


def print_outcome(board: Board, asked: int, interrupted: bool) -> None:
    from .tables import decisions_table

    out = console()
    if board.decisions:
        out.print()
        out.print(decisions_table(board.decisions))
    if interrupted:
        kept = len(board.decisions)
        print(f"interrupted: {kept} of {asked} problems are decided and kept in the store", file=sys.stderr)
