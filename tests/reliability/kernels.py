"""Checks of the race on this machine's real kernels: false winners, repeatability, wrong picks. All time real work."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision
from gemmtune.core.problem import Problem
from gemmtune.core.workloads import build, label, workload
from gemmtune.dispatch import current_target
from gemmtune.store import MemoryStore
from gemmtune.timing.clock import CpuClock
from gemmtune.timing.flush import Flush
from gemmtune.timing.machine import CpuMachine
from gemmtune.timing.race import Entrant, RaceSetup, race
from gemmtune.tuning.tuner import Budget, Tuner

from .bench import Bench, Call, paired_times, ratio
from .checks import Outcome, check


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Use this number of torch's threads in the block."""
    former = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def _tune(problems: Sequence[Problem], budget: float | None = None) -> list[Decision]:
    """Tune problems with ATen's and the native candidates, with an empty store."""
    tuner = Tuner(current_target(), ("aten", "native"), MemoryStore(), Budget(seconds=budget) if budget else None)
    return tuner.tune([(problem, 1) for problem in problems])


# False winners among identical candidates


def _load_core_and_memory(stop: Any) -> None:
    """Stream through more memory than the cache has, and compute, until ``stop`` is set."""
    torch.set_num_threads(1)
    data = torch.ones(16 << 20)
    while not stop.is_set():
        data.mul_(1.0000001)
        (data[:262144].view(512, 512) @ data[:262144].view(512, 512)).sum()


@contextmanager
def _busy_core() -> Iterator[None]:
    """Run a process that uses one core and memory bandwidth during the block."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    process = context.Process(target=_load_core_and_memory, args=(stop,), daemon=True)
    process.start()
    time.sleep(3.0)  # importing torch
    try:
        yield
    finally:
        stop.set()
        process.join(10.0)
        process.kill()


def _races_of_identical_kernels(sweeps: int) -> tuple[int, list[dict[str, Any]]]:
    """Race copies of real kernels, with one thread or all. Return the number of races and the false winners."""
    rng = random.Random(4)
    target = current_target()
    aten_mm = Candidate.make("aten", "mm")
    calls: list[Call] = []
    for dtype, m, n, k in (("bf16", 16, 2048, 2048), ("fp32", 4, 1024, 1024), ("int8wo", 1, 4096, 4096)):
        problem = build(m, n, k, dtype)
        bench = Bench.of(problem, target)
        (decision,) = _tune([problem], 3.0)
        chosen = next(row for row in decision.evidence if row.id == decision.chosen)
        calls.append(bench.call(Candidate.from_dict(chosen.candidate)))
        if dtype != "int8wo":
            calls.append(bench.call(aten_mm))
    false_winners = []
    for seed in range(sweeps):
        call, count = calls[seed % len(calls)], rng.choice((2, 4, 8, 16))
        entrants = [Entrant(f"same{i}", call, is_baseline=i == 0, packing="g") for i in range(count)]
        with _threads(1 if seed % 2 else torch.get_num_threads()):
            result = race(entrants, CpuClock(), 1.5, seed=seed, setup=RaceSetup(machine=CpuMachine()))
        if result.outcome != "tie":
            false_winners.append({"seed": seed, "kernel": seed % len(calls), "count": count, "stopped": result.stopped})
    return sweeps, false_winners


@check("A/A on real kernels of this machine, 100 sweeps of 2 to 16 copies, idle", "false winner < 2%", timed=True)
def real_identical_idle(full: bool) -> Outcome:
    sweeps, false_winners = _races_of_identical_kernels(100 if full else 6)
    return Outcome(
        f"{len(false_winners)} false winners in {sweeps} sweeps",
        len(false_winners) < 0.02 * sweeps,
        {"false": false_winners},
    )


@check("the same with the other core kept busy (compute and memory)", "false winner < 2%", timed=True)
def real_identical_busy(full: bool) -> Outcome:
    with _busy_core():
        sweeps, false_winners = _races_of_identical_kernels(100 if full else 6)
    return Outcome(
        f"{len(false_winners)} false winners in {sweeps} sweeps",
        len(false_winners) < 0.02 * sweeps,
        {"false": false_winners},
    )


@check("a kernel that sleeps a known time (2, 5, 20 ms)", "mean within 2.5%", timed=True)
def sleeping_kernel(full: bool) -> Outcome:
    clock, relative_errors = CpuClock(), {}
    for seconds in (2e-3, 5e-3, 20e-3):

        def sleep(_: int, seconds: float = seconds) -> None:
            end = time.perf_counter() + seconds
            time.sleep(seconds - 0.5e-3)  # a sleep for the whole time ends late by the kernel's timer slack
            while time.perf_counter() < end:
                pass

        calls = clock.calls_for(sleep, 500e-6)
        times = [clock.time_round([sleep], [calls])[0] for _ in range(60 if full else 10)]
        relative_errors[seconds] = sum(times) / len(times) / seconds - 1.0
    worst = max(map(abs, relative_errors.values()))
    return Outcome(
        ", ".join(f"{1e3 * seconds:g} ms: {error:+.2%}" for seconds, error in relative_errors.items()),
        worst <= 0.025,
        {"off": relative_errors},
    )


# Repeatability


@check(
    "the same shape tuned 20 times (three shapes); each time, at once, what was chosen raced again at length against "
    "the runners-up of its race and what other runs had chosen most",
    "within 2% of the best on >= 95% of runs",
    timed=True,
)
def tuned_again(full: bool) -> Outcome:
    """Race the finalists directly after each tuning: the state of a shared host differs some minutes later."""
    runs = 20 if full else 2
    rows: list[dict[str, Any]] = []
    shapes = (("int8wo", 1, 4096, 4096), ("bf16", 16, 2048, 2048), ("fp32", 64, 1024, 1024))
    for dtype, m, n, k in shapes:
        problem = build(m, n, k, dtype)
        chosen: Counter[Candidate] = Counter()
        for run in range(runs):
            (decision,) = _tune([problem])
            winner, *runners_up = _finalists(decision)
            entries = list(dict.fromkeys([winner, *runners_up[:2], *(item for item, _ in chosen.most_common(4))]))[:6]
            ratios = _ratios_to_best(problem, entries, allocations=6 if full else 2)
            rows.append({
                "problem": label(problem), "run": run, "candidate": winner.id, "of_best": ratios[0],
                "others": {item.id: value for item, value in zip(entries[1:], ratios[1:], strict=True)},
            })  # fmt: skip
            chosen[winner] += 1
    good = sum(row["of_best"] <= 1.02 for row in rows)
    worst = max(row["of_best"] for row in rows)
    return Outcome(
        f"{good} of {len(rows)} runs within 2% of the best; worst {worst - 1:.1%} behind",
        good >= 0.95 * len(rows),
        {"rows": rows},
    )


def _finalists(decision: Decision) -> list[Candidate]:
    """Return the chosen candidate, then the other finalists of its race, the fastest first."""
    finalists = [
        row for row in decision.evidence if row.stage == "finalist" and row.sample and row.id != decision.chosen
    ]
    finalists.sort(key=lambda row: row.sample.ratio if row.sample else 0.0)
    chosen = next(row for row in decision.evidence if row.id == decision.chosen)
    return [Candidate.from_dict(row.candidate) for row in (chosen, *finalists)]


def _ratios_to_best(problem: Problem, candidates: Sequence[Candidate], allocations: int) -> list[float]:
    """Return the ratio of each candidate's time to the fastest's, the median over ``allocations`` of new operands.

    The fastest is selected on one half of the allocations, and the ratios to it are measured on the other half, in both
    directions: the lowest of many noisy times is too low, and all ratios to it would be too high. The address of a
    packed weight changes the time of a memory-bound kernel by up to 5% here (sometimes 13%) as long as the weight stays
    there: a measurement on one set of operands would include this, however long it took. Kernels of one layout share
    the packed weights.
    """
    ratios: list[list[float]] = [[] for _ in candidates]
    for seed in range(allocations):
        bench = Bench.of(problem, current_target())
        calls = [bench.call(candidate) for candidate in candidates]
        times = paired_times(calls, 0.3 * len(candidates), min_rounds=40, seed=seed, before=bench.flush)
        for row, candidate_times in zip(ratios, times, strict=True):
            row.append(ratio(candidate_times, times[0]).center)
    halves = [[median(row[half::2]) for row in ratios] for half in (0, 1)]
    results = [1.0] * len(candidates)
    for selection, measurement in (halves, halves[::-1]):
        best = selection.index(min(selection))
        results = [
            result * (value / measurement[best]) ** 0.5 for result, value in zip(results, measurement, strict=True)
        ]
    return results


# Wrong picks


def _random_problems(count: int) -> list[Problem]:
    """Return random problems of four dtypes with log-uniform sizes; equal for equal counts."""
    rng = random.Random(5)

    def size(low: int, high: int) -> int:
        return round(low * (high / low) ** rng.random())

    dtypes = ("bf16", "fp32", "int8wo", "int8")
    return [build(size(1, 256), 16 * size(4, 256), 16 * size(4, 256), dtypes[i % len(dtypes)]) for i in range(count)]


def _pytorch_calls(bench: Bench) -> dict[str, Call]:
    """Return calls of the functions that PyTorch users call for the problem, by candidate id."""
    family = bench.problem.family
    names = {"mm": ("mm", "mkldnn"), "int_mm": ("int_mm", "int_mm_t"), "mixed_mm": ("int8pack", "composite")}[family]
    calls = {}
    for name in names:
        candidate = Candidate.make("aten", name)
        try:
            call = bench.call(candidate)
            call(0)
        except Exception:  # ATen has no such function for this problem
            continue
        calls[candidate.id] = call
    return calls


def _reexamine(decision: Decision, seconds: float) -> dict[str, Any]:
    """Race the served candidate with every correct candidate of ATen, interleaved and for a long time.

    The operands are as cold as in the decision's race: a host's last-level cache may contain all of a small problem.
    """
    problem = Problem.from_dict(decision.problem)
    bench, flush = Bench.of(problem, current_target()), Flush(problem, current_target())
    rows = {row.id: Candidate.from_dict(row.candidate) for row in decision.evidence if row.verdict and row.verdict.ok}
    wrong = {row.id for row in decision.evidence if row.verdict and row.verdict.kind in ("wrong", "unstable")}
    aten = {name: bench.call(candidate) for name, candidate in rows.items() if candidate.backend == "aten"}
    aten.update({name: call for name, call in _pytorch_calls(bench).items() if name not in aten and name not in wrong})
    quick = {name: median(paired_times([call], 0.1, min_rounds=3, before=flush)[0]) for name, call in aten.items()}
    best = min(quick.values(), default=0.0)  # none if every candidate of ATen is wrong for this problem
    rivals = {name: call for name, call in aten.items() if quick[name] <= 1.3 * best and name != decision.chosen}
    served = bench.call(rows[decision.chosen]) if decision.chosen else aten[min(quick, key=lambda name: quick[name])]
    times = paired_times([served, *rivals.values()], seconds, before=flush)
    ratios = {name: ratio(times[0], rival_times) for name, rival_times in zip(rivals, times[1:], strict=True)}
    worst = max(ratios, key=lambda name: ratios[name].center, default=None)
    return {
        "problem": label(problem),
        "outcome": decision.outcome,
        "chosen": decision.chosen,
        "rival": worst,
        "of_rival": ratios[worst].center if worst else 1.0,
        "lo": ratios[worst].lo if worst else 1.0,
        "pairs": len(times[0]),
    }


@check(
    "decisions re-examined with a 10x longer duel: llama-small (bf16, fp32, int8wo, int8) and 100 random problems",
    "<= 1% of them slower than ATen's best by more than 2%",
    timed=True,
)
def wrong_picks(full: bool) -> Outcome:
    small = [p for dtype in ("bf16", "fp32", "int8wo", "int8") for p, _ in workload("llama-small", dtype)]
    problems = small + _random_problems(100) if full else _random_problems(6)
    rows = []
    for problem in problems:
        (decision,) = _tune([problem])
        rows.append(_reexamine(decision, 5.0))
    wrong = [row for row in rows if row["of_rival"] > 1.02]
    significant = [row for row in wrong if row["lo"] > 1.0]
    won = sum(row["outcome"] == "winner" for row in rows)
    return Outcome(
        f"{len(wrong)} of {len(rows)} ({len(significant)} beyond the re-examination's own noise); {won} winners",
        len(wrong) <= 0.01 * len(rows),
        {"rows": rows},
    )


@check(
    "for comparison: torch.compile max-autotune with freezing on 20 of the random problems (bf16, fp32), a duel of 2 s",
    "published",
    timed=True,
)
def wrong_picks_of_inductor(full: bool) -> Outcome:
    problems = [p for p in _random_problems(100) if p.family == "mm"][: 20 if full else 2]
    rows = [_inductor(problem, 2.0) for problem in problems]
    wrong = [row for row in rows if row["of_aten"] > 1.02]
    worst = max(row["of_aten"] for row in rows)
    seconds = median(row["compile_s"] for row in rows)
    return Outcome(
        f"{len(wrong)} of {len(rows)} slower than ATen's best by more than 2%, worst {worst:.2f}x its time; "
        f"{seconds:.1f} s of compiling each",
        True,
        {"rows": rows},
    )


def _inductor(problem: Problem, seconds: float) -> dict[str, Any]:
    """Time the kernel that torch.compile picks for a linear layer, against F.linear and oneDNN with packed weights."""
    import torch._inductor.config as inductor

    bench = Bench.of(problem, current_target(), max_sets=1)
    item = bench.sets[0]
    assert isinstance(item.b, torch.Tensor)
    layer = torch.nn.Linear(problem.k, problem.n, bias=False, dtype=item.b.dtype).requires_grad_(False).eval()
    with torch.no_grad():
        layer.weight.copy_(item.b.t())
        start = time.perf_counter()
        with inductor.patch(freezing=True):
            torch._dynamo.reset()
            compiled = torch.compile(layer, mode="max-autotune")
            compiled(item.a)
        compile_s = time.perf_counter() - start
        pack, run = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
        rivals: dict[str, Callable[[int], object]] = {"F.linear": lambda _: F.linear(item.a, layer.weight)}
        packed = pack(layer.weight, problem.m)
        rivals["oneDNN prepacked"] = lambda _: run(item.a, packed, None, "none", [], "")
        times = paired_times([lambda _: compiled(item.a), *rivals.values()], seconds)
    # The guards cost some 20 us a call, which the picked kernel does not cause: measured on a tiny graph, subtracted.
    guards = _guard_seconds()
    compiled_times = [max(value - guards, 1e-9) for value in times[0]]
    ratios = {
        name: ratio(compiled_times, rival_times).center for name, rival_times in zip(rivals, times[1:], strict=True)
    }
    worst = max(ratios, key=lambda name: ratios[name])
    return {
        "problem": label(problem),
        "rival": worst,
        "of_aten": ratios[worst],
        "compile_s": compile_s,
        "guards_s": guards,
    }


_guards: list[float] = []


def _guard_seconds() -> float:
    """Return the seconds that a call of a compiled module takes before it computes anything; measured once."""
    if not _guards:
        layer = torch.nn.Linear(8, 8, bias=False).requires_grad_(False).eval()
        x = torch.ones(1, 8)
        with torch.no_grad():
            compiled = torch.compile(layer)
            compiled(x)
            times = paired_times([lambda _: compiled(x), lambda _: layer(x)], 0.5)
        _guards.append(max(0.0, median(times[0]) - median(times[1])))
    return _guards[0]


# Budgets


@check(
    "a user's budget of 2 or 6 s on real problems (M up to 64, one whose first look takes longer left out)",
    "honoured within 10%",
    timed=True,
)
def tuning_budget(full: bool) -> Outcome:
    problems = [
        build(m, n, k, d) for d in ("bf16", "int8wo", "fp32", "int8") for m, n, k in ((1, 4096, 4096), (64, 2048, 2048))
    ]
    rows = []
    for problem in problems if full else problems[:2]:
        for budget in (2.0, 6.0):
            (decision,) = _tune([problem], budget)
            sample = next(row.sample for row in decision.evidence if row.id == decision.chosen)
            extended = sample is not None and "extended" in sample.conditions
            rows.append(
                {
                    "problem": label(problem),
                    "budget": budget,
                    "of_budget": decision.seconds / budget,
                    "extended": extended,
                }
            )
    worst = max((row["of_budget"] for row in rows if not row["extended"]), default=0.0)
    longest = max((row["of_budget"] for row in rows if row["extended"]), default=0.0)
    extended = f", {longest:.2f}x among those extended on a disturbed machine" if longest else ""
    return Outcome(
        f"longest {worst:.2f}x its budget in {len(rows)} tunings{extended}",
        worst <= 1.1 and longest <= 2.1,
        {"rows": rows},
    )
