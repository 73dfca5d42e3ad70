"""``gemmtune tune``: tune problems and store the decisions."""

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
    WorkloadOption,
    checked_store,
    exit_on_error,
    fail,
    parse_backends,
    parse_latency,
    plain_console,
    print_json,
    print_lines,
    problems_by_device,
    quiet_stdout,
    require_memory,
    selected_tuning_target,
)
from .sizes import BatchOption, ConfigKeyOption, MOption, parse_config_key, parse_sizes

if TYPE_CHECKING:
    from ..core.problem import Problem
    from ..core.target import Target
    from ..report.layers import Model
    from ..store.base import Store
    from ..timing.clock import Latency
    from ..tuning.config_keys import ConfigKey
    from ..tuning.sizes import Sizes
    from .progress import ProgressState


@exit_on_error
def tune(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL|M,N,K", help="file.py:factory, package.module:factory, or shapes."),
    ] = None,
    workload: WorkloadOption = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="D", help="fp32, bf16 [default], fp16, fp64, int8, int8wo, int4wo, fp8wo, fp8."
        ),
    ] = None,
    bias: Annotated[bool, typer.Option("--bias", help="With shapes: add a bias of N.")] = False,
    m: MOption = None,
    batch: BatchOption = None,
    config_key: ConfigKeyOption = None,
    backends: BackendsOption = None,
    budget: BudgetOption = None,
    hot: HotOption = False,
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    latency: LatencyOption = "graph",
    force: Annotated[bool, typer.Option("--force", help="Tune again what the store already answers.")] = False,
    store_path: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tune the matrix multiplies of a model, of a workload or of the given shapes, and store the decisions.

    A factory returns (model, example_inputs): the arguments of one call as a tuple, or as a dict of keyword arguments,
    or a list of these.
    Without --device a model's multiplies are tuned for the devices that they ran on. Ctrl-C ends the run; the decisions
    of finished problems stay in the store. With --m the store also has a plan for each weight: the kernel that serves
    each M; with --batch one for each batched product: the kernel that serves each batch.
    """
    model, shapes = split_what(what or [])
    parsed_latency, sizes, batches = parse_latency(latency), parse_sizes(m, "--m"), parse_sizes(batch, "--batch")
    key = parse_config_key(config_key, sizes)
    parse_backends(backends)  # so that a wrong name is reported before a model runs
    with quiet_stdout(as_json):
        groups_by_device = problems_by_device(model, shapes, workload, dtype, bias=bias, device=device)
        runs = [
            (selected_tuning_target(threads, device_name), problems, parse_backends(backends, device_name))
            for device_name, problems, _ in groups_by_device
        ]
    if shapes:  # of a workload or a model, the problems that fit are worth tuning
        require_memory(runs[0][1], runs[0][0])
    requested = sum(len(problems) for _, problems, _ in runs)
    if not requested:
        fail("every one of these problems is empty (M, N or K is 0): there is nothing to tune", as_json=as_json)
    board, interrupted = None, False
    with checked_store(store_path) as store:
        if (
            force
            or sizes is not None
            or batches is not None
            or any(store.get(target, p.key) is None for target, problems, _ in runs for p, _ in problems)
        ):
            store.check_writable()  # before the search, because its decisions would be lost
        for (target, problems, names), group in zip(runs, groups_by_device, strict=True):
            board, interrupted = run(
                problems, group.device, names, store,
                budget=budget, force=force, hot=hot, hidden=as_json, latency=parsed_latency, board=board, m=sizes,
                batch=batches, config_key=key,
            )  # fmt: skip
            store_ceilings(store, target)
            store_layers(store, target, model, group.layers)
            if interrupted:
                break
    assert board is not None
    report_outcome(board, requested, interrupted, as_json=as_json)


def split_what(what: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split the command's arguments into a model or None, and shapes.

    An argument with a colon is a model. A second model is returned among the shapes: ``collect`` refuses shapes beside
    a model.
    """
    models = [text for text in what if ":" in text]
    shapes = [text for text in what if ":" not in text]
    return (models[0], [*models[1:], *shapes]) if models else (None, shapes)


def run(
    problems: Sequence[tuple[Problem, int]],
    device: str,
    names: Sequence[str],
    store: Store,
    *,
    budget: float | None,
    force: bool = False,
    hot: bool = False,
    hidden: bool = False,
    latency: Latency = "graph",
    board: ProgressState | None = None,
    m: Sizes | None = None,
    batch: Sizes | None = None,
    config_key: ConfigKey | None = None,
) -> tuple[ProgressState, bool]:
    """Tune problems on one device with the progress display, and store the decisions; with ``m`` and ``batch``, which
    are as for ``gemmtune.tune``, plans for their weights too, with a ``config_key`` by its keys.

    Return the board with the decisions (``board`` itself if given) and whether Ctrl-C ended the run.
    """
    from ..tuning.api import tune_on_device
    from .progress import ProgressState, progress_display

    board = board or ProgressState()
    with progress_display(board, hidden=hidden) as progress:
        try:
            tune_on_device(
                problems, device, store, budget=budget, backends=names, progress=progress, force=force,
                operands="hot" if hot else "cold", latency=latency, m=m, batch=batch, config_key=config_key,
            )  # fmt: skip
        except KeyboardInterrupt:
            return board, True
    return board, False


def store_ceilings(store: Store, target: Target) -> None:
    """Measure the machine's ceilings once per target, so that the report can draw its roofline from the store alone.

    GPUs are skipped: ``ceilings`` measures memory bandwidth and arithmetic rate on the CPU only.
    """
    from ..report import ceilings

    if not target.is_cpu:
        return
    path = ceilings.ceilings_path(store)
    if path is not None:
        ceilings.load_or_measure(path, target)


def store_layers(store: Store, target: Target, model: str | None, layers_of_model: Model | None) -> None:
    """Save which layers of a model run which problems, so that the report can tell how much time a forward saves.

    Nothing is saved without a model, or for a store without a file.
    """
    from ..report import layers

    path = layers.layers_path(store)
    if path is not None and model is not None and layers_of_model is not None:
        layers.save(path, model, target.key, layers_of_model)


def report_outcome(board: ProgressState, requested: int, interrupted: bool, *, as_json: bool) -> None:
    """Print the table, or the JSON document.

    Exit with code 1 if the run was interrupted, a problem has no valid candidate, or a decision was not stored.
    """
    failed = [decision for decision in board.decisions if decision.outcome == "none_valid"]
    if as_json:
        print_json(outcome_document(board, interrupted))
    else:
        print_outcome(board, requested, interrupted)
    if interrupted or failed or board.unstored:
        raise typer.Exit(1)


def outcome_document(board: ProgressState, interrupted: bool) -> dict[str, Any]:
    """Return the outcome of the run as a dict that can be written as JSON.

    ``not_kept`` is the number of decisions that the store did not accept, ``store_error`` the reason. ``plans`` has a
    row for each weight that was tuned over a range of M.
    """
    from ..report.plan_rows import plan_document
    from ..report.rows import sorted_decisions, summarize

    rows = []
    for decision in sorted_decisions(board.decisions):
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
    not_stored = {} if not board.unstored else {"not_kept": board.unstored, "store_error": board.store_error}
    plans = [plan_document(plan) for plan in board.plans]
    return {"interrupted": interrupted, "from_store": board.cached, **not_stored, "decisions": rows, "plans": plans}


def print_outcome(board: ProgressState, requested: int, interrupted: bool) -> None:
    from ..tuning.tuner import inconclusive_summary
    from .tables import decisions_table, plans_table

    out = plain_console()
    if board.decisions:
        out.print()
        out.print(decisions_table(board.decisions))
    if board.plans:
        out.print()
        out.print(plans_table(board.plans))
    if message := inconclusive_summary(board.decisions):
        print_lines(message, file=sys.stderr)
    if interrupted:
        stored = sum(decision.outcome != "inconclusive" for decision in board.decisions) - board.unstored
        # With --m more problems are tuned than were requested: the weights' M.
        decided = f"{stored} of {requested} problems" if stored <= requested else f"{stored} problems"
        kept_plans = f", and {len(board.plans)} plans" if board.plans else ""
        print_lines(f"interrupted: {decided} are decided and kept in the store{kept_plans}", file=sys.stderr)
    if board.unstored:
        print_lines(
            f"error: {board.unstored} of {len(board.decisions)} decisions are not kept: {board.store_error}",
            file=sys.stderr,
        )
