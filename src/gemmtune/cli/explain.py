"""``gemmtune explain M N K``: print a decision with its evidence, and the plan that its M is in the range of.

``gemmtune explain --graph file.py:factory``: print what the backend of torch.compile makes of a model's products.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    StoreOption,
    ThreadsOption,
    checked_store,
    exit_on_error,
    fail,
    parse_device,
    parse_problem,
    plain_console,
    print_json,
    quiet_stdout,
    selected_target,
)
from .usage import fail_usage

if TYPE_CHECKING:
    from rich.console import Console

    from ..core.decision import Decision, Evidence, LayoutDecision, Sample
    from ..core.target import Target
    from ..store.base import Store

_STAGE_ORDER = ("winner", "finalist", "eliminated", "screened", "failed", "untried", "illegal")
# The stages without a sample, and the reason to print for candidates without one.
_UNTIMED_STAGES = {"untried": "the search ended before them", "illegal": "no reason given"}

_BRIEF_KEYS = ("serves", "sure", "next")  # the keys of the three lines in JSON


@exit_on_error
def explain(
    context: typer.Context,
    m: Annotated[int | None, typer.Argument(min=0, metavar="M")] = None,
    n: Annotated[int | None, typer.Argument(min=0, metavar="N")] = None,
    k: Annotated[int | None, typer.Argument(min=0, metavar="K")] = None,
    graph: Annotated[
        str | None,
        typer.Option(
            "--graph", metavar="FILE:FACTORY", help="A model, as for `tune`: its products under torch.compile."
        ),
    ] = None,
    dtype: DtypeOption = "bf16",
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    any_machine: Annotated[
        bool, typer.Option("--any-machine", help="Also decisions of other machines, thread counts or versions.")
    ] = False,
    brief: Annotated[
        bool, typer.Option("--brief", help="Only what serves, how sure that is, and what to do next.")
    ] = False,
    store_path: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the decisions for a shape: in three lines what serves, how sure that is and what to do next; then all their
    evidence: every candidate, why some were illegal, verdicts, samples with their intervals and the conditions they
    were taken under, and why the race stopped. Then the plan of a weight that was tuned for many M: what serves where,
    times over M, what was verified, and which kernels cannot serve. With --graph, for each product of a model's graphs:
    its kernel and its form (alone, fused with what follows, merged with others), or why it stays PyTorch's."""
    if graph is not None:
        if m is not None or threads is not None or device is not None or any_machine or brief:
            fail_usage("--graph goes without M N K; besides it there are --dtype, --store and --json")
        from .explain_graph import explain_graph

        explain_graph(graph, dtype if _is_given(context, "dtype") else None, store_path, as_json=as_json)
        return
    if m is None or n is None or k is None:
        fail_usage("give a shape, M N K, or a model: --graph file.py:factory")
    if dtype not in _known_dtypes():
        fail_usage(f"unknown dtype {dtype!r}; known dtypes: {', '.join(_known_dtypes())}")
    from .explain_plan import matching_plans, plan_json, show_plan

    shape = (m, n, k)
    with quiet_stdout(as_json):
        target = selected_target(threads, parse_device(device))
    with checked_store(store_path) as store:
        owner = None if any_machine else target
        decisions = matching_decisions(store, owner, shape, dtype)
        plans = matching_plans(store, owner, shape, short_dtype(shape, dtype))
        if not decisions and not plans:
            fail(_no_decision_message(store, target, shape, dtype), as_json=as_json)
    option = "" if target.is_cpu else f" --device {device}"
    if as_json:
        rows = [_decision_json(decision, option, brief=brief) for decision in decisions]
        print_json({"decisions": rows, "plans": [plan_json(plan, m, brief=brief) for plan in plans]})
        return
    out = plain_console()
    for decision in decisions:
        show(decision, out, brief=brief, option=option)
    for plan in plans:
        show_plan(plan, m, out, brief=brief)


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether an option is on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _known_dtypes() -> tuple[str, ...]:
    from ..core.workloads import DTYPES

    return tuple(DTYPES)


def matching_decisions(store: Store, target: Target | None, shape: tuple[int, int, int], dtype: str) -> list[Decision]:
    """Return the stored decisions for a shape and a short dtype name, of one target or (None) of all.

    There are several if problems differ in epilogue or layout.
    """
    from ..core.problem import Problem
    from ..core.workloads import dtype_name

    short_name = short_dtype(shape, dtype)
    matches = []
    for decision in store.decisions(target):
        problem = Problem.from_dict(decision.problem)
        if (problem.m, problem.n, problem.k) == shape and dtype_name(problem) == short_name:
            matches.append(decision)
    return matches


def short_dtype(shape: tuple[int, int, int], dtype: str) -> str:
    """Return the short name of the dtypes of a shape's Problem with a ``--dtype``."""
    from ..core.workloads import dtype_name

    return dtype_name(parse_problem(shape, dtype))


def _decision_json(decision: Decision, option: str, *, brief: bool) -> dict[str, Any]:
    import msgspec

    from .answer import answer

    if brief:
        return {"problem": decision.problem_key, **dict(zip(_BRIEF_KEYS, answer(decision, option), strict=True))}
    record: dict[str, Any] = msgspec.to_builtins(decision)
    return record


def _no_decision_message(store: Store, target: Target, shape: tuple[int, int, int], dtype: str) -> str:
    m, n, k = shape
    if 0 in shape:
        return f"{m}x{n}x{k} is empty (M, N or K is 0): there is nothing to decide, and nothing is tuned"
    owner = f"this machine with {target.threads} threads" if target.is_cpu else f"the {target.name}"
    text = f"the store has no decision for {m}x{n}x{k} {dtype} on {owner}"
    elsewhere = sum(
        1
        for other_target in store.targets()
        if other_target.key != target.key and matching_decisions(store, other_target, shape, dtype)
    )
    if elsewhere:
        text += f"; {elsewhere} of another machine, device, thread count or version: --any-machine shows them"
    option = "" if target.is_cpu else f" --device {target.device}"
    return f"{text}; make one with: gemmtune tune {m},{n},{k} --dtype {dtype}{option}"


def show(decision: Decision, out: Console, *, brief: bool = False, option: str = "") -> None:
    """Print a decision's three-line answer (see ``answer``) and, unless ``brief``, its evidence.

    option: command line options that tuning the problem again needs, such as `` --device cuda``.
    """
    from .answer import answer

    for line in answer(decision, option):
        out.print(line, soft_wrap=True)
    if not brief:
        out.print()
        show_evidence(decision, out)


def show_evidence(decision: Decision, out: Console) -> None:
    """Print a decision with the conditions of its race and all candidates."""
    from ..report.rows import summarize
    from .tables import speedup_text

    row = summarize(decision)
    created = time.strftime("%Y-%m-%d %H:%M", time.localtime(decision.created))
    out.print(row.label, style="bold", soft_wrap=True, end="  ")
    out.print(decision.problem_key, soft_wrap=True)
    out.print(f"outcome: {_outcome_text(decision)}  {speedup_text(row)}", soft_wrap=True)
    out.print(f"made {created} in {decision.seconds:.1f} s, seed {decision.seed}, target {decision.target_key}")
    out.print(f"stopped: {decision.stopped or 'not recorded'}", soft_wrap=True)
    common_conditions = race_conditions(decision)
    if common_conditions:
        out.print(f"timed with: {conditions_text(common_conditions)}", soft_wrap=True)
    for packing, candidate in sorted(decision.alternatives.items()):
        out.print(f"fastest with packing {packing or 'none'}: {candidate}", soft_wrap=True)
    for packing, layout in sorted(decision.layouts.items()):
        out.print(f"paired test with packing {packing or 'none'}: {layout_text(layout)}", soft_wrap=True)
    out.print()
    for text in (*tried_lines(decision, common_conditions), *untimed_lines(decision)):
        out.print(text, soft_wrap=True)
    out.print()


def _outcome_text(decision: Decision) -> str:
    chosen = decision.chosen or ""
    return {
        "winner": f"winner {chosen}",
        "tie": f"tie - nothing beat ATen beyond the noise, so {chosen} serves",
        "inconclusive": "inconclusive - the machine was too disturbed to decide; PyTorch's own kernels serve",
        "none_valid": "no candidate was valid; dispatch falls back to the plain ATen op",
    }[decision.outcome]


def layout_text(layout: LayoutDecision) -> str:
    """Return the paired test in one layout as text: ``winner X, 0.90x [0.89-0.91] the time of Y; back to back 0.92x``.

    The ratios after the first are those measured among other work (``timing.surroundings``).
    """
    interval = f"[{layout.ratio_lo:.3f}-{layout.ratio_hi:.3f}]"
    text = f"{layout.outcome} {layout.candidate}, {layout.ratio:.3f}x {interval} the time of {layout.baseline}"
    surroundings = [f"{name} {ratio:.3f}x" for name, ratio in layout.surroundings.items()]
    overlap_note = [] if layout.overlap else ["served without overlapping the kernel in front of it"]
    return "; ".join([text, *surroundings, *overlap_note])


def conditions_of(sample: Sample) -> dict[str, str]:
    """Return the conditions that a Sample was measured under.

    Records written before the field ``conditions`` existed have only whether the operands were cold.
    """
    return {"operands": sample.condition, **sample.conditions}


def race_conditions(decision: Decision) -> dict[str, str]:
    """Return the conditions of the chosen candidate's Sample, else of the first Sample; empty if nothing was timed."""
    rows = [decision.find(decision.chosen), *decision.evidence]
    return next((conditions_of(row.sample) for row in rows if row is not None and row.sample is not None), {})


def conditions_text(conditions: Mapping[str, str]) -> str:
    """Return conditions as one line of text: ``operands cold; threads 2``."""
    return "; ".join(f"{name} {value}" for name, value in conditions.items())


def tried_lines(decision: Decision, common_conditions: Mapping[str, str]) -> list[str]:
    """Return the lines for all candidates that were tried, best first.

    Each candidate has a line with its stage, times and verdict, and below it a line with its id and the reason for its
    stage. A third line has its conditions where they differ from ``usual``, which are printed above.

    The lines are no table: ids are longer than a column can be, and an unbroken id can be searched for and pasted.
    """
    from ..report.rows import time_text

    lines = [f"{'stage':<11} {'median [95%]':<31} {'rounds':>6}  {'time / ATen [95%]':<20}  verdict"]
    for row in sorted((row for row in decision.evidence if row.stage not in _UNTIMED_STAGES), key=_sort_key):
        sample = row.sample
        times = rounds = ratio = "-"
        if sample is not None:
            times = f"{time_text(sample.median_s)} [{time_text(sample.lo_s)} - {time_text(sample.hi_s)}]"
            rounds = str(sample.rounds)
            ratio = f"{sample.ratio:.3f} [{sample.ratio_lo:.3f}-{sample.ratio_hi:.3f}]"
        lines.append(f"{row.stage:<11} {times:<31} {rounds:>6}  {ratio:<20}  {_verdict_text(row)}")
        lines.append(f"            {row.id}" + (f": {row.reason}" if row.reason else ""))
        if sample is not None and sample.packing_s:
            lines.append(f"            packing its weight took {time_text(sample.packing_s)}, once")
        if sample is not None and (different := dict(conditions_of(sample).items() - common_conditions.items())):
            lines.append(f"            timed with: {conditions_text(dict(sorted(different.items())))}")
    return [*lines, ""]


def untimed_lines(decision: Decision) -> list[str]:
    """Return the lines for the candidates that were not tried and for the illegal ones, grouped by reason."""
    lines = []
    for stage in _UNTIMED_STAGES:
        for reason, rows in by_reason(decision, stage).items():
            lines += [f"{stage} ({len(rows)}): {reason}", *(f"  {row.id}" for row in rows)]
    return lines


def _sort_key(row: Evidence) -> tuple[int, float]:
    return _STAGE_ORDER.index(row.stage), row.sample.median_s if row.sample is not None else float("inf")


def _verdict_text(row: Evidence) -> str:
    if row.verdict is None:
        return "not checked"
    words = row.verdict.kind.replace("_", " ")
    if row.verdict.kind == "within_bound":
        words += f" (worst error {row.verdict.worst:.2f} of the bound)"
    return f"{words}: {row.verdict.detail}" if row.verdict.detail and not row.verdict.ok else words


def by_reason(decision: Decision, stage: str) -> dict[str, list[Evidence]]:
    """Return the candidates of a stage, grouped by their reason."""
    groups: dict[str, list[Evidence]] = defaultdict(list)
    for row in decision.evidence:
        if row.stage == stage:
            groups[row.reason or _UNTIMED_STAGES.get(stage, "")].append(row)
    return dict(groups)
