"""Program of ``make demo``: record, tune, optimize and compare a Llama-style decoder on this CPU, then write a report.

Decisions are stored in .gemmtune/store.db (or $GEMMTUNE_STORE), so a second run does not tune again.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("GEMMTUNE_STORE", str(Path(".gemmtune") / "store.db"))

import llama
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import gemmtune
from gemmtune.cli.common import plain_console
from gemmtune.cli.progress import ProgressState, progress_display
from gemmtune.cli.tables import decisions_table
from gemmtune.cli.tune import store_ceilings
from gemmtune.dispatch import current_target
from gemmtune.report import write_report
from gemmtune.store import open_store
from gemmtune.timing.stats import Interval, ratio_interval

# The optimised model's largest logit error against float64 may be at most this multiple of the plain model's: both
# round at every step, and only the order of their sums differs.
ERROR_ALLOWED = 3.0
DECODE_STEPS = 8
# Plain PyTorch's speed differs by up to a fifth between processes (int8, decode: 20.7 to 25.1 tokens/s), while runs
# within a process agree within a few percent: intervals over runs alone would be too narrow. A 95% interval by signed
# ranks needs at least six processes.
PROCESSES = 6


class Float64(TorchFunctionMode):
    """Mode that runs every operation in float64, so that the reference needs no second model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # attributes such as .shape need no conversion
            return func(*args, **(kwargs or {}))
        keywords = {name: _to_float64(arg) for name, arg in (kwargs or {}).items()}
        return func(*(_to_float64(arg) for arg in args), **keywords)


def _to_float64(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return type(value)(_to_float64(item) for item in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Speedup:
    """Tokens per second before and after (medians), and the 95% interval of their ratio over processes."""

    before: float
    after: float
    ratio: Interval


@dataclass(frozen=True)
class Check:
    """Largest logit errors of one variant's two models against float64, and the number of equal greedy tokens."""

    variant: str
    plain_error: float
    tuned_error: float
    same_tokens: int
    tokens: int

    @property
    def ok(self) -> bool:
        return self.tuned_error <= ERROR_ALLOWED * self.plain_error


def record(variant: str, model: nn.Module, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return the Problems of the model's prefill and decode calls, with their counts."""
    with torch.inference_mode(), gemmtune.record() as recorded:
        for call in calls:
            model(*call)
    problems = list(recorded.problems)
    print(f"{variant}: {sum(count for _, count in problems)} matrix multiplies, {len(problems)} different problems")
    return problems


def logits_after(model: nn.Module, tokens: Tensor, prompt: int) -> Tensor:
    """Return the logits after the prompt and after each further token: [len(tokens) - prompt + 1, vocab]."""
    cache = model.new_cache(1)
    rows = [llama.prefill(model, tokens[:, :prompt], cache)]
    rows += [model(tokens[:, position : position + 1], cache, position) for position in range(prompt, tokens.shape[1])]
    return torch.cat(rows).double()


def check(variant: str, plain: nn.Module, tuned: nn.Module) -> Check:
    """Compare the logits and the greedy tokens of both models with a float64 reference."""
    tokens = llama.example_prompt(plain.config, 64 + DECODE_STEPS)
    with Float64():
        reference = plain(tokens)[0, 63:]
    before, after = (logits_after(model, tokens, 64) for model in (plain, tuned))
    return Check(
        variant=variant,
        plain_error=float((before - reference).abs().max()),
        tuned_error=float((after - reference).abs().max()),
        same_tokens=int((before.argmax(-1) == after.argmax(-1)).sum()),
        tokens=before.shape[0],
    )


def _workloads(model: nn.Module) -> dict[str, Callable[[nn.Module], int]]:
    """Return prefill of 64 tokens, and decoding with batches of 1 and 4; each returns its number of tokens."""
    prompt = llama.example_prompt(model.config)

    def prefill(decoder: nn.Module) -> int:
        llama.prefill(decoder, prompt, decoder.new_cache(1))
        return prompt.shape[1]

    def decode(batch: int) -> Callable[[nn.Module], int]:
        cache = model.new_cache(batch)
        first = torch.zeros(batch, model.config.vocab)
        return lambda decoder: llama.decode(decoder, first, cache, prompt.shape[1], DECODE_STEPS).numel()

    return {"decode": decode(1), "decode, batch of 4": decode(4), "prefill of 64": prefill}


def time_turns(plain: nn.Module, tuned: nn.Module, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return the tokens per second of both models by workload, ``rounds`` pairs each.

    The models alternate, in random order within a pair, so that other processes affect both equally.
    """
    rates: dict[str, list[tuple[float, float]]] = {}
    rng = random.Random()
    for name, work in _workloads(plain).items():
        tokens = work(plain)
        work(tuned)  # warm-up, as the call before
        rates[name] = []
        for _ in range(rounds):
            seconds: dict[nn.Module, float] = {}
            for model in rng.sample((plain, tuned), 2):
                start = time.perf_counter()
                work(model)
                seconds[model] = time.perf_counter() - start
            rates[name].append((tokens / seconds[plain], tokens / seconds[tuned]))
    return rates


def summarize(processes: Sequence[Sequence[tuple[float, float]]]) -> Speedup:
    """Return the speed-up of one workload from the (plain, tuned) tokens per second of each process."""
    pairs = [pair for process in processes for pair in process]
    before, after = (statistics.median(rates) for rates in zip(*pairs, strict=True))
    ratios = [statistics.median(tuned / plain for plain, tuned in process) for process in processes]
    return Speedup(before, after, ratio_interval(ratios, [1.0] * len(ratios)))


def time_in_processes(variants: Sequence[str], args: argparse.Namespace) -> dict[str, dict[str, Speedup]]:
    """Return speed-ups by variant and workload over PROCESSES new processes. Raises CalledProcessError if one fails."""
    rates: list[dict[str, dict[str, list[tuple[float, float]]]]] = []
    for number in range(PROCESSES):
        if sys.stderr.isatty():
            print(f"\rtiming whole models: process {number + 1} of {PROCESSES}", end="", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, "--time-turns", "--variants", ",".join(variants)]
        command += ["--rounds", str(args.rounds), "--layers", str(args.layers)]
        finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rates.append(json.loads(finished.stdout.splitlines()[-1]))
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return {
        variant: {
            workload: summarize([process[variant][workload] for process in rates]) for workload in rates[0][variant]
        }
        for variant in variants
    }


def print_comparison(result: Check, speedups: Mapping[str, Speedup]) -> None:
    verdict = "same within the bound" if result.ok else "NOT the same within the bound"
    print(f"\n{result.variant}: outputs {verdict}")
    print(
        f"  largest error of a logit against float64: plain PyTorch {result.plain_error:.2e}, tuned "
        f"{result.tuned_error:.2e} (allowed: {ERROR_ALLOWED:g}x plain's); "
        f"greedy tokens equal: {result.same_tokens} of {result.tokens}"
    )
    for name, speedup in speedups.items():
        ratio = speedup.ratio
        print(
            f"  {name:<20}{speedup.before:8.1f} -> {speedup.after:8.1f} tokens/s   {ratio.center:.2f}x "
            f"({ratio.lo:.2f}..{ratio.hi:.2f} over {PROCESSES} processes)"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", default="fp32,bf16,int8", help="comma separated [fp32,bf16,int8]")
    parser.add_argument("--budget", type=float, help="seconds for each problem [6, more where calls are slow]")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs for each process and workload [3]")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers [4]")
    parser.add_argument("--report", type=Path, default=Path("report.html"), help="file of the report [report.html]")
    parser.add_argument("--time-turns", action="store_true", help=argparse.SUPPRESS)  # for the timing processes
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    variants = args.variants.split(",")
    config = llama.Config(layers=args.layers)
    if args.time_turns:
        with torch.inference_mode():
            print(json.dumps({name: time_turns(*plain_and_optimized(name, config), args.rounds) for name in variants}))
        return 0
    recorded: dict[Any, int] = {}
    for variant in variants:
        for problem, count in record(variant, *llama.factory(variant, config)):
            recorded[problem] = recorded.get(problem, 0) + count
    state = ProgressState()
    try:
        with progress_display(state) as progress:
            gemmtune.tune(list(recorded.items()), budget=args.budget, progress=progress)
    except KeyboardInterrupt:
        print(f"interrupted: {len(state.decisions)} of {len(recorded)} decisions are kept; run again to go on")
        return 1
    if state.cached == len(recorded):
        print("every decision came from the store")
    print()
    plain_console().print(decisions_table(state.decisions))
    with torch.inference_mode():
        results = [check(variant, *plain_and_optimized(variant, config)) for variant in variants]
    speedups = time_in_processes(variants, args)
    for result in results:
        print_comparison(result, speedups[result.variant])
    save_report(args.report)
    return 0 if all(result.ok for result in results) else 1


def plain_and_optimized(variant: str, config: llama.Config) -> tuple[nn.Module, nn.Module]:
    """Return the plain model and an optimized copy."""
    plain, calls = llama.factory(variant, config)
    tuned = copy.deepcopy(plain)
    with torch.inference_mode():
        gemmtune.optimize(tuned, calls, tune=False)
    return plain, tuned


def save_report(path: Path) -> None:
    store = open_store()
    try:
        target = current_target()
        store_ceilings(store, target)
        write_report(store, path, target=target)
    finally:
        store.close()
    print(f"\nreport: {path.resolve()}")


if __name__ == "__main__":
    sys.exit(main())
