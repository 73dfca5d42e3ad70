"""Generate with models of transformers, unchanged, eagerly and under ``torch.compile(backend="gemmtune")``.

    python benchmarks/hf_generate.py                     Llama, Qwen2, Mixtral; small configurations, random weights
    python benchmarks/hf_generate.py --device cuda --size large --dtype bf16 --mode reduce-overhead

Each model generates greedily with a static cache. Its ``forward`` is compiled for the steps that follow the prompt, as
``generate`` of transformers compiles it by itself; ``generate`` is transformers' own. The tokens must be those of the
eager model: in fp32 all of them; in bf16 a fused form rounds less often, and a token may differ where two logits are
closer than a rounding, after which the texts go apart. So the benchmark counts equal tokens up to the first difference,
and in bf16 the tokens that eager PyTorch's roundings allow: those whose logit, of a float32 copy of the model that
reads the same text, is below the largest one by at most twice the largest error of eager PyTorch's logits of that text.
``--emulate`` keeps the roundings of eager PyTorch under both compilers (``emulate_precision_casts``). It needs
transformers.
"""

from __future__ import annotations

import argparse
import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config
import transformers
from harness import Spread, paired_ratios, write_results
from torch import Tensor

import gemmtune

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES: dict[str, dict[str, int]] = {
    "small": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 256,
    },
    "large": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 1024,
    },
}  # fmt: skip
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def build(name: str, size: str, dtype: torch.dtype, device: str) -> Any:
    """Return a model of transformers with random weights."""
    model_class, config_class, extra = MODELS[name]
    config = getattr(transformers, config_class)(**SIZES[size], **extra)
    torch.manual_seed(0)
    return getattr(transformers, model_class)(config).to(device, dtype).eval()


def generate(model: Any, prompt: Tensor, tokens: int) -> Tensor:
    result: Tensor = model.generate(
        prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, cache_implementation="static",
        disable_compile=True, pad_token_id=0,
    )  # fmt: skip
    return result[:, prompt.shape[1] :]


def compiled_for_steps(forward: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``compiled`` for single tokens, and ``forward`` for the prompt: that call makes the
    cache, which would be memory of a CUDA graph."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        tokens = kwargs.get("input_ids")
        return (compiled if tokens is not None and tokens.shape[1] == 1 else forward)(*args, **kwargs)

    return run


def count_allowed(eager: Any, exact: Any, prompt: Tensor, tokens: Tensor) -> int:
    """Return how many of the generated tokens [1, n] the roundings of ``eager`` allow. exact: its float32 copy."""
    text = torch.cat([prompt, tokens], dim=1)
    first = prompt.shape[1] - 1
    logits, rounded = (model(text).logits[0, first:-1].float() for model in (exact, eager))
    missing = logits.amax(-1) - logits.gather(-1, tokens[0, :, None])[:, 0]
    return int((missing <= 2 * (logits - rounded).abs().amax()).sum())


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Generate with both models and return the row."""
    torch._dynamo.reset()
    dtype = DTYPES[options.dtype]
    eager = build(name, options.size, dtype, options.device)
    models = {"eager": eager}
    for backend in options.backends.split(","):
        models[backend] = copy.deepcopy(eager)
        forward = models[backend].forward
        if backend == "gemmtune":
            own = {"budget": options.budget, "emulate_precision_casts": options.emulate}
            compiled = gemmtune.compile(forward, mode=options.mode, options=own)
        else:
            mode = "max-autotune" if backend == "max-autotune" else options.mode
            compiled = torch.compile(forward, mode=mode)
        models[backend].forward = compiled_for_steps(forward, compiled)
    prompt = torch.randint(1, 1000, (1, 7), device=options.device)
    tokens, times = {}, {}
    for each, model in models.items():
        start = time.perf_counter()
        tokens[each] = generate(model, prompt, options.tokens)
        times[each] = []
        print(f"{name} {each}: first {options.tokens} tokens after {time.perf_counter() - start:.0f} s", flush=True)
    for _ in range(options.rounds):
        for each, model in models.items():
            start = time.perf_counter()
            generate(model, prompt, options.tokens)
            if options.device == "cuda":
                torch.cuda.synchronize()
            times[each].append((time.perf_counter() - start) / options.tokens)
    exact = copy.deepcopy(eager).float() if dtype != torch.float32 else eager
    row: dict[str, Any] = {"model": name, "seconds_a_token": times, "equal_tokens": {}}
    for each in models:
        if each == "eager":
            continue
        differing = (tokens[each] != tokens["eager"]).nonzero()
        equal = int(differing[0, 1]) if len(differing) else options.tokens
        ratio = paired_ratios(times["eager"], times[each])
        row["equal_tokens"][each] = equal
        allowed = ""
        if dtype != torch.float32:
            count = row.setdefault("allowed_tokens", {})[each] = count_allowed(eager, exact, prompt, tokens[each])
            allowed = f" ({count} allowed by its roundings)"
        print(
            f"{name} {options.dtype} {each}: {equal} of {options.tokens} tokens as eager{allowed}, "
            f"{1e3 * Spread.of(times[each]).median:.2f} ms a token, {ratio.median:.2f}x of eager's speed "
            f"({ratio.low:.2f} to {ratio.high:.2f})"
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--backends", default="inductor,gemmtune")
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mode", help="of torch.compile, for both compilers")
    parser.add_argument("--emulate", action="store_true", help="keep the roundings of eager PyTorch")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds to tune a Problem [1]")
    options = parser.parse_args()
    # All models share the code of transformers' wrapper around forward, whose recompilations Dynamo counts.
    dynamo_config.recompile_limit = 64
    with torch.no_grad(), inductor_config.patch(emulate_precision_casts=options.emulate):
        rows = [measure(name, options) for name in options.models.split(",")]
    write_results("hf-generate", rows, command=vars(options), transformers=transformers.__version__)


if __name__ == "__main__":
    main()
