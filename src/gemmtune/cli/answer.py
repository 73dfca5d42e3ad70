"""A decision in three lines: what serves, how sure that is, what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.problem import Problem
from ..core.workloads import DTYPES, build, dtype_name
from ..report.rows import Row, disturbance, duration, measured, rival, summarize

if TYPE_CHECKING:
    from ..core.decision import Decision, Evidence


def answer(decision: Decision, option: str = "") -> tuple[str, str, str]:
    """The three lines. option: what the command that tunes this again needs besides (`` --device cuda``)."""
    row, trouble = summarize(decision), disturbance(decision)
    return (
        f"{row.label}: {_serves(decision, row)}",
        f"sure: {_how_sure(decision, row)}" + (f"; the machine was disturbed: {trouble}" if trouble else ""),
        f"next: {_next(decision, trouble, option)}",
    )


def _serves(decision: Decision, row: Row) -> str:
    if row.outcome == "winner":
        times = f"{duration(row.best_s)} a call, ATen {duration(row.aten_s)}: {row.speedup:.2f}x"
        return f"{decision.chosen} serves, {times}"
    if row.outcome == "tie":
        return f"ATen serves ({decision.chosen}), {duration(row.best_s)} a call; nothing was faster beyond the noise"
    return "PyTorch's own kernels serve"


def _how_sure(decision: Decision, row: Row) -> str:
    chosen = decision.find(decision.chosen)
    if chosen is None:
        refused = sum(item.verdict is not None and not item.verdict.ok for item in decision.evidence)
        return f"no candidate was valid, {refused} of {row.tried} that were tried were refused"
    rounds = chosen.sample.rounds if chosen.sample is not None else 0
    checked = f"its results were {_checked(chosen)}"
    if row.outcome == "winner":
        against = rival(decision)
        over = f" of {against.id}" if against is not None else ""
        return f"{row.lo:.2f}x to {row.hi:.2f}x with 95% over {rounds} timings by turns with those{over}; {checked}"
    other = next((item for item in measured(decision) if item.id != chosen.id), None)
    if other is None or other.sample is None:
        return f"nothing else was timed; {checked}"
    near = f"{other.sample.ratio:.2f}x its time [{other.sample.ratio_lo:.2f}-{other.sample.ratio_hi:.2f}]"
    return f"the best other candidate, {other.id}, takes {near}; {checked}"


def _checked(row: Evidence) -> str:
    if row.verdict is None:
        return "not checked"
    if row.verdict.kind == "within_bound":
        return f"within the bound (worst error {row.verdict.worst:.2f} of it)"
    return row.verdict.kind.replace("_", " ")


def _next(decision: Decision, trouble: str, option: str) -> str:
    again = _command(decision, option)
    if decision.outcome == "none_valid":
        return f"nothing is lost but the gain: PyTorch serves; after an update of gemmtune or torch, {again}"
    if decision.outcome == "inconclusive" or trouble:
        return f"when the machine is idle, {again}"
    if decision.outcome == "tie":
        return f"nothing; to search longer, {again} --budget 60"
    return "nothing: calls of gemmtune's ops and optimized modules use it on the machine that it was made on"


def _command(decision: Decision, option: str) -> str:
    """How to tune the problem again: by its shape where that says all of it."""
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
