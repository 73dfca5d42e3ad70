"""The example decoder is a causal decoder, and the demo's reference, check and interval are correct."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

EXAMPLES = Path(__file__).parent.parent / "examples"


def load_example(name: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


llama = load_example("llama")
TINY = llama.Config(dim=64, layers=2, heads=4, kv_heads=2, hidden=96, vocab=128, max_tokens=32)


@pytest.mark.parametrize("variant", llama.VARIANTS)
def test_kv_cache_does_not_change_the_logits(variant: str) -> None:
    model = llama.build(variant, TINY)
    tokens = llama.example_prompt(TINY, 12)
    with torch.inference_mode():
        logits = model(tokens)
        cache = model.new_cache(1)
        rows = [llama.prefill(model, tokens[:, :8], cache)]
        rows += [model(tokens[:, position : position + 1], cache, position) for position in range(8, 12)]
    worst = (torch.cat(rows).float() - logits[0, 7:].float()).abs().max()
    assert worst <= (1e-5 if variant == "fp32" else 0.06)


def test_attention_is_causal_and_depends_on_positions() -> None:
    model = llama.build("fp32", TINY)
    tokens = llama.example_prompt(TINY, 8)
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % TINY.vocab
    swapped = tokens[:, [1, 0, *range(2, 8)]]
    with torch.inference_mode():
        original_logits, changed_logits, swapped_logits = model(tokens), model(changed), model(swapped)
    assert torch.equal(original_logits[0, :5], changed_logits[0, :5])
    assert not torch.allclose(original_logits[0, 5:], changed_logits[0, 5:])
    assert not torch.allclose(original_logits[0, -1], swapped_logits[0, -1], atol=1e-4)


def test_batches_are_independent_and_decoding_is_greedy() -> None:
    model = llama.build("fp32", TINY)
    prompt = llama.example_prompt(TINY, 6)
    with torch.inference_mode():
        single_cache, batch_cache = model.new_cache(1), model.new_cache(4)
        single = llama.decode(model, llama.prefill(model, prompt, single_cache), single_cache, 6, 5)
        batch = llama.decode(model, llama.prefill(model, prompt.expand(4, 6), batch_cache), batch_cache, 6, 5)
        assert batch.shape == (4, 5)
        assert torch.equal(batch, single.expand(4, 5))
        assert int(single[0, 0]) == int(model(prompt)[0, -1].argmax())


def test_int8_weights_are_close_to_the_float_weights() -> None:
    linear = nn.Linear(64, 32, bias=False)
    quantised = llama.quantise(linear)
    assert quantised.weight.dtype == torch.int8
    assert quantised.weight.shape == (32, 64)
    restored = quantised.weight.float() * quantised.scales[:, None]
    assert (restored - linear.weight).abs().max() <= quantised.scales.max() / 2 * 1.01
    model = llama.build("int8", TINY)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())


def test_factory_returns_prefill_and_decode_calls() -> None:
    model, calls = llama.factory("bf16", llama.Config(**{**TINY.__dict__, "max_tokens": 96}))
    with torch.inference_mode():
        shapes = [tuple(model(*call).shape) for call in calls]
    assert shapes == [(1, 128), (1, 128), (4, 128)]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="fp32, bf16, int8"):
        llama.build("fp8", TINY)


def test_weights_are_repeatable_and_logits_have_a_plausible_scale() -> None:
    first, second = llama.build("bf16", TINY), llama.build("bf16", TINY)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    with torch.inference_mode():
        assert 0.3 < float(first(llama.example_prompt(TINY, 8)).float().std()) < 3


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setenv("GEMMTUNE_STORE", str(tmp_path / "store.db"))
    return load_example("demo")


def test_demo_reference_is_float64(demo: ModuleType) -> None:
    tokens = llama.example_prompt(TINY, 8)
    plain, double = llama.build("fp32", TINY), llama.build("fp32", TINY).double()
    with torch.inference_mode():
        with demo.Float64():
            reference = plain(tokens)
        assert reference.dtype == torch.float64
        assert (reference - double(tokens)).abs().max() < 1e-12
        assert 0 < (plain(tokens).double() - reference).abs().max() < 1e-4


def test_demo_check_detects_a_wrong_model(demo: ModuleType) -> None:
    config = llama.Config(**{**TINY.__dict__, "max_tokens": 96})
    plain, changed = llama.build("bf16", config), llama.build("bf16", config)
    with torch.inference_mode():
        equal_check = demo.check("bf16", plain, changed)
        changed.head.weight.mul_(1.2)
        wrong_check = demo.check("bf16", plain, changed)
        rates = demo.time_turns(plain, changed, rounds=2)
    assert equal_check.ok
    assert equal_check.same_tokens == equal_check.tokens == demo.DECODE_STEPS + 1
    assert not wrong_check.ok
    assert set(rates) == {"decode", "decode, batch of 4", "prefill of 64"}
    assert all(len(pairs) == 2 and min(map(min, pairs)) > 0 for pairs in rates.values())


def test_demo_interval_includes_the_variation_between_processes(demo: ModuleType) -> None:
    # Two of six processes have a slow plain model. Turns of one process differ by 1%.
    plain = [100.0, 100.0, 80.0, 100.0, 80.0, 100.0]
    speedup = demo.summarize([[(rate, 200.0), (rate * 1.01, 200.0), (rate * 0.99, 200.0)] for rate in plain])
    assert speedup.ratio.lo == pytest.approx(2.0)
    assert speedup.ratio.hi == pytest.approx(2.5)
    assert (speedup.before, speedup.after) == (99.0, 200.0)
