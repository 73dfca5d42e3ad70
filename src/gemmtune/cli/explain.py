"""``gemmtune explain M N K``: a decision and everything that led to it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from .common import (
    DeviceOption,
    JsonOption,
    StoreOption,
    ThreadsOption,
    console,
    current_target,
    emit,
    fail,
    guard,
    opened,
    parse_device,
    parse_problem,
    quiet_stdout,
)
from .errors import usage

if TYPE_CHECKING:
    from rich.console import Console

    from ..core.decision import Decision, Evidence, LayoutDecision, Sample
    from ..core.target import Target
    from ..store.base import Store

_ORDER = ("winner", "finalist", "eliminated", "screened", "failed", "untried", "illegal")
# The stages without a sample, and what to say of rows that give no reason.
_UNTIMED = {"untried": "the search ended before them", "illegal": "no reason given"}

_BRIEF = ("serves", "sure", "next")  # the names of the three lines in JSON


@guard
def explain(
    m: Annotated[int, typer.Argument(min=0, metavar="M")],
    n: Annotated[int, typer.Argument(min=0, metavar="N")],
    k: Annotated[int, typer.Argument(min=0, metavar="K")],
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="D", help="fp32, bf16, fp16, fp64, int8, int8wo, int4wo, fp8wo or fp8.")
    ] = "bf16",
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    any_machine: Annotated[
        bool, typer.Option("--any-machine", help="Also decisions of other machines, thread counts or versions.")
    ] = False,
    brief: Annotated[
        bool, typer.Option("--brief", help="Only what serves, how sure that is, and what to do next.")
    ] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the decisions for a shape: in three lines what serves, how sure that is and what to do next; then all their
    evidence: every candidate, why some were illegal, verdicts, samples with their intervals and the conditions they
    were taken under, and why the race stopped."""
    if dtype not in _known_dtypes():
        usage(f"unknown dtype {dtype!r}; known dtypes: {', '.join(_known_dtypes())}")
    with quiet_stdout(as_json):
        target = current_target(threads, parse_device(device))
    with opened(store) as keeper:
        found = matching(keeper, None if any_machine else target, (m, n, k), dtype)
        if not found:
            fail(_nothing(keeper, target, (m, n, k), dtype), as_json=as_json)
    from .answer import answer

    option = "" if target.device == "cpu" else f" --device {device}"
    if as_json:
        import msgspec

        short = [{"problem": row.problem_key, **dict(zip(_BRIEF, answer(row, option), strict=True))} for row in found]
        emit({"decisions": short if brief else [msgspec.to_builtins(decision) for decision in found]})
        return
    out = console()
    for decision in found:
        show(decision, out, brief=brief, option=option)


def _known_dtypes() -> tuple[str, ...]:
    from ..core.workloads import DTYPES

    return tuple(DTYPES)


def matching(store: Store, target: Target | None, shape: tuple[int, int, int], dtype: str) -> list[Decision]:
    """The stored decisions for a shape and a short dtype name (several when epilogues or layouts differ)."""
    from ..core.problem import Problem
    from ..core.workloads import dtype_name

    wanted = dtype_name(parse_problem(shape, dtype))
    found = []
    for decision in store.decisions(target):
        problem = Problem.from_dict(decision.problem)
        if (problem.m, problem.n, problem.k) == shape and dtype_name(problem) == wanted:
            found.append(decision)
    return found


def _nothing(store: Store, target: Target, shape: tuple[int, int, int], dtype: str) -> str:
    m, n, k = shape
    if 0 in shape:
        return f"{m}x{n}x{k} is empty (M, N or K is 0): there is nothing to decide, and nothing is tuned"
    place = f"this machine with {target.threads} threads" if target.device == "cpu" else f"the {target.name}"
    text = f"the store has no decision for {m}x{n}x{k} {dtype} on {place}"
    others = sum(1 for other in store.targets() if other.key != target.key and matching(store, other, shape, dtype))
    if others:
        text += f"; {others} of another machine, device, thread count or version: --any-machine shows them"
    option = "" if target.device == "cpu" else f" --device {target.device}"
    return f"{text}; make one with: gemmtune tune {m},{n},{k} --dtype {dtype}{option}"


def show(decision: Decision, out: Console, *, brief: bool = False, option: str = "") -> None:
    """Print what a decision comes to and, unless ``brief``, its evidence. option: what a command to tune it again
    needs besides."""
    from .answer import answer

    for line in answer(decision, option):
        out.print(line, soft_wrap=True)
    if not brief:
        out.print()
        show_evidence(decision, out)


def show_evidence(decision: Decision, out: Console) -> None:
    """Print one decision with everything that led to it."""
    from ..report.rows import summarize
    from .tables import speedup_text

    row = summarize(decision)
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(decision.created))
    out.print(row.label, style="bold", soft_wrap=True, end="  ")
    out.print(decision.problem_key, soft_wrap=True)
    out.print(f"outcome: {_outcome_words(decision)}  {speedup_text(row)}", soft_wrap=True)
    out.print(f"made {made} in {decision.seconds:.1f} s, seed {decision.seed}, target {decision.target_key}")
    out.print(f"stopped: {decision.stopped or 'not recorded'}", soft_wrap=True)
    usual = usual_conditions(decision)
    if usual:
        out.print(f"timed with: {words_of(usual)}", soft_wrap=True)
    for packing, candidate in sorted(decision.alternatives.items()):
        out.print(f"fastest with packing {packing or 'none'}: {candidate}", soft_wrap=True)
    for packing, layout in sorted(decision.layouts.items()):
        out.print(f"duel with packing {packing or 'none'}: {layout_words(layout)}", soft_wrap=True)
    out.print()
    for text in (*evidence_lines(decision, usual), *without_a_time(decision)):
        out.print(text, soft_wrap=True)
    out.print()


def _outcome_words(decision: Decision) -> str:
    chosen = decision.chosen or ""
    return {
        "winner": f"winner {chosen}",
        "tie": f"tie - nothing beat ATen beyond the noise, so {chosen} serves",
        "inconclusive": "inconclusive - the machine was too disturbed to decide; PyTorch's own kernels serve",
        "none_valid": "no candidate was valid; dispatch falls back to the plain ATen op",
    }[decision.outcome]


def layout_words(layout: LayoutDecision) -> str:
    """A layout's duel in one line: ``winner X, 0.90x [0.89-0.91] the time of Y; back to back 0.92x``."""
    interval = f"[{layout.ratio_lo:.3f}-{layout.ratio_hi:.3f}]"
    text = f"{layout.outcome} {layout.candidate}, {layout.ratio:.3f}x {interval} the time of {layout.baseline}"
    around = [f"{name} {ratio:.3f}x" for name, ratio in layout.surroundings.items()]
    apart = [] if layout.overlap else ["served without overlapping the kernel in front of it"]
    return "; ".join([text, *around, *apart])


def conditions_of(sample: Sample) -> dict[str, str]:
    """What a Sample was taken under; records older than ``conditions`` say at least whether operands were cold."""
    return {"operands": sample.condition, **sample.conditions}


def usual_conditions(decision: Decision) -> dict[str, str]:
    """The conditions of the race: those of what was chosen, or else of the first Sample; empty without any."""
    rows = [decision.find(decision.chosen), *decision.evidence]
    return next((conditions_of(row.sample) for row in rows if row is not None and row.sample is not None), {})


def words_of(conditions: Mapping[str, str]) -> str:
    """``operands cold; threads 2``: conditions in one line."""
    return "; ".join(f"{name} {value}" for name, value in conditions.items())


def evidence_lines(decision: Decision, usual: Mapping[str, str]) -> list[str]:
    """Every candidate that was tried, best first: its figures, below them its id and why it stopped there.

    usual: conditions said already; a sample says where its own differ.

    Not a table: ids are longer than a column can be, and whole ones can be searched for and pasted.
    """
    from ..report.rows import duration

    lines = [f"{'stage':<11} {'median [95%]':<31} {'rounds':>6}  {'time / ATen [95%]':<20}  verdict"]
    for row in sorted((row for row in decision.evidence if row.stage not in _UNTIMED), key=_place):
        sample = row.sample
        times = rounds = ratio = "-"
        if sample is not None:
            times = f"{duration(sample.median_s)} [{duration(sample.lo_s)} - {duration(sample.hi_s)}]"
            rounds = str(sample.rounds)
            ratio = f"{sample.ratio:.3f} [{sample.ratio_lo:.3f}-{sample.ratio_hi:.3f}]"
        lines.append(f"{row.stage:<11} {times:<31} {rounds:>6}  {ratio:<20}  {_verdict_words(row)}")
        lines.append(f"            {row.id}" + (f": {row.reason}" if row.reason else ""))
        if sample is not None and sample.packing_s:
            lines.append(f"            packing its weight took {duration(sample.packing_s)}, once")
        if sample is not None and (other := dict(conditions_of(sample).items() - usual.items())):
            lines.append(f"            timed with: {words_of(dict(sorted(other.items())))}")
    return [*lines, ""]


def without_a_time(decision: Decision) -> list[str]:
    """The candidates that were not tried and the illegal ones, by reason."""
    lines = []
    for stage in _UNTIMED:
        for reason, rows in by_reason(decision, stage).items():
            lines += [f"{stage} ({len(rows)}): {reason}", *(f"  {row.id}" for row in rows)]
    return lines


def _place(row: Evidence) -> tuple[int, float]:
    return _ORDER.index(row.stage), row.sample.median_s if row.sample is not None else float("inf")


def _verdict_words(row: Evidence) -> str:
    if row.verdict is None:
        return "not checked"
    words = row.verdict.kind.replace("_", " ")
    if row.verdict.kind == "within_bound":
        words += f" (worst error {row.verdict.worst:.2f} of the bound)"
    return f"{words}: {row.verdict.detail}" if row.verdict.detail and not row.verdict.ok else words


def by_reason(decision: Decision, stage: str) -> dict[str, list[Evidence]]:
    """The candidates of a stage by the reason they are there."""
    groups: dict[str, list[Evidence]] = defaultdict(list)
    for row in decision.evidence:
        if row.stage == stage:
            groups[row.reason or _UNTIMED.get(stage, "")].append(row)
    return dict(groups)
