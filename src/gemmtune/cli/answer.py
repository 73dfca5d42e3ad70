"""A decision in three lines: which kernel serves, how certain the result is, and what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.problem import Problem
from ..core.workloads import DTYPES, build, dtype_name
from ..report.rows import DecisionSummary, baseline_of, disturbances_of, summarize, time_text, timed_candidates

if TYPE_CHECKING:
    from ..core.decision import Decision, Evidence


def answer(decision: Decision, option: str = "") -> tuple[str, str, str]:
    """Return the three lines.

    option: command line options that tuning the problem again needs, such as `` --device cuda``.
    """
    row, disturbances = summarize(decision), disturbances_of(decision)
    return (
        f"{row.label}: {_serving_text(decision, row)}",
        f"sure: {_confidence_text(decision, row)}"
        + (f"; the machine was disturbed: {disturbances}" if disturbances else ""),
        f"next: {_next_step_text(decision, disturbances, option)}",
    )


def _serving_text(decision: Decision, row: DecisionSummary) -> str:
    if row.outcome == "winner":
        times = f"{time_text(row.best_s)} a call, ATen {time_text(row.aten_s)}: {row.speedup:.2f}x"
        return f"{decision.chosen} serves, {times}"
    if row.outcome == "tie":
        return f"ATen serves ({decision.chosen}), {time_text(row.best_s)} a call; nothing was faster beyond the noise"
    return "PyTorch's own kernels serve"


def _confidence_text(decision: Decision, row: DecisionSummary) -> str:
    chosen = decision.find(decision.chosen)
    if chosen is None:
        failed = sum(item.verdict is not None and not item.verdict.ok for item in decision.evidence)
        return f"no candidate was valid, {failed} of {row.tried} that were tried were refused"
    rounds = chosen.sample.rounds if chosen.sample is not None else 0
    verdict = f"its results were {_verdict_text(chosen)}"
    if row.outcome == "winner":
        baseline = baseline_of(decision)
        name = f" of {baseline.id}" if baseline is not None else ""
        return f"{row.lo:.2f}x to {row.hi:.2f}x with 95% over {rounds} timings by turns with those{name}; {verdict}"
    other = next((item for item in timed_candidates(decision) if item.id != chosen.id), None)
    if other is None or other.sample is None:
        return f"nothing else was timed; {verdict}"
    comparison = f"{other.sample.ratio:.2f}x its time [{other.sample.ratio_lo:.2f}-{other.sample.ratio_hi:.2f}]"
    return f"the best other candidate, {other.id}, takes {comparison}; {verdict}"


def _verdict_text(evidence: Evidence) -> str:
    if evidence.verdict is None:
        return "not checked"
    if evidence.verdict.kind == "within_bound":
        return f"within the bound (worst error {evidence.verdict.worst:.2f} of it)"
    return evidence.verdict.kind.replace("_", " ")


def _next_step_text(decision: Decision, disturbances: str, option: str) -> str:
    command = _tune_command(decision, option)
    if decision.outcome == "none_valid":
        return f"nothing is lost but the gain: PyTorch serves; after an update of gemmtune or torch, {command}"
    if decision.outcome == "inconclusive" or disturbances:
        return f"when the machine is idle, {command}"
    if decision.outcome == "tie":
        return f"nothing; to search longer, {command} --budget 60"
    return "nothing: calls of gemmtune's ops and optimized modules use it on the machine that it was made on"


def _tune_command(decision: Decision, option: str) -> str:
    """Return the command that tunes the problem again: by shape if shape, dtype and bias describe the whole problem,
    else by model."""
    problem = Problem.from_dict(decision.problem)
    dtype = dtype_name(problem)
    for bias in (False, True) if dtype in DTYPES else ():
        try:
            same = build(problem.m, problem.n, problem.k, dtype, bias=bias).key == problem.key
        except ValueError:  # a bias goes with some dtypes only
            continue
        if same:
            shape = f"{problem.m},{problem.n},{problem.k}"
            return f"gemmtune tune {shape} --dtype {dtype}{' --bias' if bias else ''}{option} --force"
    return "gemmtune tune --force the model that runs it"
