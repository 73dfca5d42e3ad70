"""Compare tokens per second of the example decoder, interleaved: eager PyTorch, torch.compile (max-autotune, freezing),
gemmtune, gemmtune's model under torch.compile, and the plain model under torch.compile(backend="gemmtune").

python benchmarks/e2e.py [--variant int8] [--rounds 7] [--no-compile]
python benchmarks/e2e.py --prefill 256        a prefill of 256 tokens in place of decoding
python benchmarks/e2e.py --variant bf16 --groups 64   torchao's int8 weights with a scale for each 64 elements of K
python benchmarks/e2e.py --variant bf16 --int4        gpt-fast's int4 weights (_weight_int4pack_mm_for_cpu), compiled
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GEMMTUNE_STORE", str(Path(".gemmtune") / "store.db"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import llama
import torch
from harness import Spread, paired_ratios, write_results
from quantized_linears import Int4Linear
from torch import Tensor, nn

import gemmtune

PROMPT = 64


class Runner:
    """Decoder (any callable of tokens, cache and position) with a KV cache of its own."""

    def __init__(self, run: Any, cache: llama.Cache) -> None:
        self.run, self.cache = run, cache

    def step(self, token: Tensor, position: int) -> Tensor:
        """Return the logits behind ``token`` [batch, tokens] at ``position``."""
        logits: Tensor = self.run(token, self.cache, position)
        return logits


def compiled(model: llama.Llama, freezing: bool = True) -> Any:
    """Return the model under torch.compile (max-autotune, by default freezing). The second position makes the position
    dynamic: the warm-up compiles twice, and the timed runs do not compile."""
    import torch._inductor.config as inductor

    inductor.freezing = freezing
    return torch.compile(model, mode="max-autotune")


def build(source: Any, args: argparse.Namespace) -> Any:
    """Return the decoder of examples/llama.py, or of another module with its functions; quantised if args.groups or
    args.int4."""
    model, _ = source.factory(args.variant, source.Config(layers=args.layers))
    if args.int4:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Int4Linear(child).requires_grad_(False))
    if args.groups:
        from torchao.quantization import IntxWeightOnlyConfig, quantize_
        from torchao.quantization.granularity import PerGroup

        quantize_(model, IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerGroup(args.groups)))
    return model


def _import_llama(name: str) -> Any:
    """Return examples/llama.py as a module of another name, whose classes have code of their own: Dynamo keeps its
    cache on a forward's code, so that models that share it slow each other."""
    spec = importlib.util.spec_from_file_location(name, llama.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def seconds_per_step(runner: Runner, batch: int, steps: int, prefill: int = 0) -> float:
    """Return the seconds per token of greedy decoding of ``steps`` tokens after 64 positions; with ``prefill``, of a
    call with so many tokens, seconds per call."""
    if prefill:
        tokens = torch.zeros(batch, prefill, dtype=torch.int64)
        start = time.perf_counter()
        runner.step(tokens, 0)
        return time.perf_counter() - start
    token = torch.zeros(batch, 1, dtype=torch.int64)
    start = time.perf_counter()
    for step in range(steps):
        token = runner.step(token, PROMPT + step).argmax(-1, keepdim=True)
    return (time.perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="int8", choices=llama.VARIANTS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prefill", type=int, default=0, metavar="TOKENS", help="time a prefill [0: decoding]")
    parser.add_argument(
        "--groups", type=int, default=0, help="elements of K that share a scale, of a floating variant [0]"
    )
    parser.add_argument("--int4", action="store_true", help="int4 weights in groups of 128, of the variant bf16")
    parser.add_argument("--steps", type=int, default=16, help="tokens a turn [16]")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved turns [7]")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--budget", type=float, help="seconds to tune a problem not in the store [6, more where calls are slow]"
    )
    parser.add_argument("--no-freezing", action="store_true", help="let torch.compile freeze no weights")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--compiled-only", action="store_true",
        help="torch.compile and backend=gemmtune alone, whose first calls then find nothing tuned",
    )  # fmt: skip
    args = parser.parse_args()
    plain = build(llama, args)
    runners = {"eager": Runner(plain, plain.new_cache(args.batch))}
    if not args.no_compile:
        runners["torch.compile"] = Runner(
            compiled(copy.deepcopy(plain), not args.no_freezing), plain.new_cache(args.batch)
        )
    step = torch.zeros(args.batch, args.prefill or 1, dtype=torch.int64)
    position = 0 if args.prefill else PROMPT
    if not (args.int4 or args.compiled_only):  # optimize replaces modules that it knows; this one calls an operator
        tuned = copy.deepcopy(plain)
        gemmtune.optimize(tuned, [(step, tuned.new_cache(args.batch), position)], budget=args.budget, m=None)
        runners["gemmtune"] = Runner(tuned, plain.new_cache(args.batch))
    if not (args.no_compile or args.int4 or args.compiled_only):
        second = build(_import_llama("llama_again"), args)
        gemmtune.optimize(second, [(step, second.new_cache(args.batch), position)], tune=False)
        runners["gemmtune, compiled"] = Runner(compiled(second, not args.no_freezing), second.new_cache(args.batch))
    if not args.no_compile:
        third = build(_import_llama("llama_inside"), args)
        inside = gemmtune.compile(third, options={} if args.budget is None else {"budget": args.budget})
        runners["backend=gemmtune"] = Runner(inside, third.new_cache(args.batch))
    ready, times = interleave_runners(runners, args)
    tokens = args.batch * max(1, args.prefill)
    rows = {
        name: {"tokens_s": tokens / Spread.of(t).median, "seconds_a_step": t, "first_calls_s": ready[name]}
        for name, t in times.items()
    }
    for name, row in rows.items():
        comparison = ""
        for other in (other for other in rows if "gemmtune" in other and other != name):
            spread = paired_ratios(times[name], times[other])
            comparison += f"   {other} is {spread.median:.2f}x [{spread.low:.2f}-{spread.high:.2f}]"
        print(f"{name:<20}{row['tokens_s']:8.2f} tokens/s, ready after {ready[name]:3.0f} s{comparison}")
    write_results(
        "e2e",
        rows,
        variant=args.variant,
        batch=args.batch,
        layers=args.layers,
        prefill=args.prefill,
        groups=args.groups,
        int4=args.int4,
        freezing=not args.no_freezing,
    )


def interleave_runners(
    runners: dict[str, Runner], args: argparse.Namespace
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the seconds of every runner's first calls, which compile, and tune what was not tuned; then its seconds
    per token by round, interleaved. PyTorch's own compiler is left out, and removed from runners, where it fails."""
    ready: dict[str, float] = {}
    for name, runner in list(runners.items()):
        begin = time.perf_counter()
        try:
            for _ in range(2 if args.prefill else 1):
                seconds_per_step(runner, args.batch, args.steps, args.prefill)
        except Exception as error:  # of any class: a defect of PyTorch
            if name != "torch.compile":
                raise
            print(f"{name} fails: {type(error).__name__}: {str(error).splitlines()[0]}")
            del runners[name]
            continue
        ready[name] = time.perf_counter() - begin
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(args.rounds):
        for name, runner in runners.items():
            times[name].append(seconds_per_step(runner, args.batch, args.steps, args.prefill))
    return ready, times


if __name__ == "__main__":
    # no_grad and not inference_mode, because freezing requires no_grad; all models run under no_grad.
    with torch.no_grad():
        main()
