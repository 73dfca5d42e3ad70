"""Models of ``benchmarks/models.py``: small configurations with random weights; no network access.

A ``Case`` constructs one model and the inputs of one forward. Widths are 256 to 512, so that linears cost more than the
overhead of a call; depths are 2 (hierarchical vision models: one or two blocks per stage).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
SCALE = int(os.environ.get("GEMMTUNE_MODELS_SCALE", "1"))  # factor of the widths and of the number of heads
GROUP = 32 if SCALE == 1 else 128  # group size of int4 weights: 128 is torchao's default, 32 fits the small widths
VOCABULARY, TOKENS = 1024, 64
WIDTH, INNER, HEADS, LAYERS = 256 * SCALE, 512 * SCALE, 4 * SCALE, 2


@dataclass(frozen=True)
class Case:
    """Model of the benchmark.

    make: returns the model in fp32 and eval mode, with random weights from torch's generator. inputs: returns the
    keyword arguments of a forward of ``length`` tokens; floating tensors are cast to the row's dtype. prompt: returns
    the keyword arguments of ``generate``; None if the class cannot generate. differentiable: the input for the check of
    gradients, a floating one or ``inputs_embeds`` instead of ``input_ids``. dtypes: the dtypes of the model's rows.
    change: a change of the model in the row's dtype (an adapter, a quantisation). optimize_first: whether ``optimize``
    runs before ``change``. package: the library that the model needs. lengths: the token counts of the forwards. extra:
    further checks of PEFT.
    """

    name: str
    kind: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    prompt: Callable[[], Inputs] | None = None
    differentiable: str | None = None
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    change: Callable[[nn.Module], nn.Module] | None = None
    optimize_first: bool = False
    package: str = "transformers"
    lengths: tuple[int, ...] = (TOKENS, 1)
    extra: tuple[str, ...] = field(default=())


CASES: dict[str, Case] = {}


def _add(case: Case) -> None:
    assert case.name not in CASES, case.name
    CASES[case.name] = case


# --- inputs ------------------------------------------------------------------------------------------------------


def ids(length: int, batch: int = 1) -> Tensor:
    """Return token ids [batch, length] without special tokens."""
    return torch.randint(10, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


def normal(*shape: int) -> Tensor:
    """Return random fp32 values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _decoder_inputs(length: int) -> Inputs:
    return {"input_ids": ids(length), "use_cache": False}


def _encoder_inputs(length: int) -> Inputs:
    return {"input_ids": ids(length), "attention_mask": torch.ones(1, length, dtype=torch.int64)}


def _encoder_decoder_inputs(length: int) -> Inputs:
    return {"input_ids": ids(TOKENS), "decoder_input_ids": ids(length), "use_cache": False}


def _prompt(length: int = 8) -> Inputs:
    return {"input_ids": ids(length), "attention_mask": torch.ones(1, length, dtype=torch.int64)}


def _pixel_inputs(size: int) -> Callable[[int], Inputs]:
    return lambda length: {"pixel_values": normal(1, 3, size, size)}


# --- classes of transformers -------------------------------------------------------------------------------------


def _transformers_class(name: str) -> Any:
    return getattr(importlib.import_module("transformers"), name)


def _transformer(model: str, config: str, **values: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module: nn.Module = _transformers_class(model)(_transformers_class(config)(**values))
        return module.eval()

    return make


_LLAMA: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": 2 * SCALE, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_BERT: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "max_position_embeddings": 256,
}  # fmt: skip
_GPT: Mapping[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BART: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
    "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
_VISION: Mapping[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "image_size": 64, "patch_size": 8,
}  # fmt: skip
_TEXT: Mapping[str, Any] = {**_BERT, "max_position_embeddings": TOKENS, "pad_token_id": 0, "bos_token_id": 1,
                            "eos_token_id": 2, "projection_dim": WIDTH}  # fmt: skip


def _decoder(name: str, model: str, config: str, kind: str = "decoder", **values: Any) -> None:
    _add(
        Case(
            name, kind, _transformer(model, config, **values), _decoder_inputs, _prompt,
            "inputs_embeds",
        )
    )  # fmt: skip


def _encoder(name: str, model: str, config: str, **values: Any) -> None:
    _add(Case(name, "encoder", _transformer(model, config, **values), _encoder_inputs, None, "inputs_embeds",
              lengths=(TOKENS,)))  # fmt: skip


def _encoder_decoder(name: str, model: str, config: str, **values: Any) -> None:
    _add(Case(name, "encoder-decoder", _transformer(model, config, **values), _encoder_decoder_inputs, _prompt))


def _vision(name: str, model: str, config: str, size: int = 64, **values: Any) -> None:
    _add(Case(name, "vision", _transformer(model, config, **values), _pixel_inputs(size), None, "pixel_values",
              lengths=(TOKENS,)))  # fmt: skip


_decoder("llama", "LlamaForCausalLM", "LlamaConfig", **_LLAMA)
_decoder("qwen2", "Qwen2ForCausalLM", "Qwen2Config", **_LLAMA)
_decoder("qwen3", "Qwen3ForCausalLM", "Qwen3Config", **_LLAMA, head_dim=64)
_decoder("mistral", "MistralForCausalLM", "MistralConfig", **_LLAMA)
_decoder("gemma2", "Gemma2ForCausalLM", "Gemma2Config", **_LLAMA, head_dim=64)
_decoder("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", **_LLAMA, head_dim=64)
_decoder("phi3", "Phi3ForCausalLM", "Phi3Config", **_LLAMA)
_decoder("olmo2", "Olmo2ForCausalLM", "Olmo2Config", **_LLAMA)
_decoder(
    "gpt2", "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
    n_positions=256, **_GPT,
)  # fmt: skip
_decoder("gpt-neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", **_BERT, **_GPT)
_decoder(
    "opt", "OPTForCausalLM", "OPTConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, ffn_dim=INNER,
    num_hidden_layers=LAYERS, num_attention_heads=HEADS, max_position_embeddings=256, word_embed_proj_dim=WIDTH, **_GPT,
)  # fmt: skip
_decoder(
    "bloom", "BloomForCausalLM", "BloomConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS,
    **_GPT,
)  # fmt: skip
_decoder(
    "falcon", "FalconForCausalLM", "FalconConfig", vocab_size=VOCABULARY, hidden_size=WIDTH,
    num_hidden_layers=LAYERS, num_attention_heads=HEADS, **_GPT,
)  # fmt: skip

_MOE = {**_LLAMA, "num_experts_per_tok": 2}
_decoder("mixtral", "MixtralForCausalLM", "MixtralConfig", "mixture of experts", **_MOE, num_local_experts=4)
_decoder(
    "qwen2-moe", "Qwen2MoeForCausalLM", "Qwen2MoeConfig", "mixture of experts", **_MOE, num_experts=4,
    moe_intermediate_size=INNER, shared_expert_intermediate_size=INNER,
)  # fmt: skip
_decoder(
    "qwen3-moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", "mixture of experts", **_MOE, num_experts=4,
    moe_intermediate_size=INNER, head_dim=64,
)  # fmt: skip

_decoder(
    "mamba", "MambaForCausalLM", "MambaConfig", "state space", vocab_size=VOCABULARY, hidden_size=WIDTH,
    num_hidden_layers=LAYERS, **_GPT,
)  # fmt: skip
_decoder(
    "mamba2", "Mamba2ForCausalLM", "Mamba2Config", "state space", vocab_size=VOCABULARY, hidden_size=WIDTH,
    num_hidden_layers=LAYERS, num_heads=8, head_dim=64, state_size=32, chunk_size=32, n_groups=1, **_GPT,
)  # fmt: skip
_decoder(
    "jamba", "JambaForCausalLM", "JambaConfig", "state space", **_LLAMA, use_mamba_kernels=False, num_experts=2,
    attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
)  # fmt: skip
_decoder(
    "rwkv", "RwkvForCausalLM", "RwkvConfig", "state space", vocab_size=VOCABULARY, hidden_size=WIDTH,
    attention_hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, context_length=256, **_GPT,
)  # fmt: skip

_encoder_decoder(
    "t5", "T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=WIDTH, d_kv=64, d_ff=INNER,
    num_layers=LAYERS, num_heads=HEADS, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
)  # fmt: skip
_encoder_decoder("bart", "BartForConditionalGeneration", "BartConfig", **_BART)
_encoder_decoder("mbart", "MBartForConditionalGeneration", "MBartConfig", **_BART)
_encoder_decoder("marian", "MarianMTModel", "MarianConfig", **_BART)
_encoder_decoder("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", **_BART)

_encoder("bert", "BertForMaskedLM", "BertConfig", **_BERT)
_encoder("roberta", "RobertaForMaskedLM", "RobertaConfig", **_BERT)
_encoder(
    "distilbert", "DistilBertForMaskedLM", "DistilBertConfig", vocab_size=VOCABULARY, dim=WIDTH, hidden_dim=INNER,
    n_layers=LAYERS, n_heads=HEADS,
)  # fmt: skip
_encoder("electra", "ElectraForMaskedLM", "ElectraConfig", **_BERT, embedding_size=128)
_encoder(
    "deberta-v2", "DebertaV2ForMaskedLM", "DebertaV2Config", **_BERT, relative_attention=True,
    pos_att_type=["p2c", "c2p"], position_buckets=32,
)  # fmt: skip
_encoder("albert", "AlbertForMaskedLM", "AlbertConfig", **_BERT, embedding_size=128)
_encoder("modernbert", "ModernBertForMaskedLM", "ModernBertConfig", **_BERT, pad_token_id=0, bos_token_id=1,
         eos_token_id=2, cls_token_id=1, sep_token_id=2)  # fmt: skip

_vision("vit", "ViTForImageClassification", "ViTConfig", **_VISION)
_vision("dinov2", "Dinov2Model", "Dinov2Config", **_VISION)
_vision(
    "swin", "SwinForImageClassification", "SwinConfig", image_size=64, patch_size=4, embed_dim=64, depths=[1, 1, 2],
    num_heads=[2, 4, 8], window_size=4,
)  # fmt: skip
_vision(
    "detr", "DetrForObjectDetection", "DetrConfig", use_timm_backbone=False, backbone=None,
    backbone_config={"model_type": "resnet", "embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1],
                     "layer_type": "basic", "out_features": ["stage2"]},
    d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_ffn_dim=INNER, decoder_ffn_dim=INNER,
    encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, num_queries=32,
)  # fmt: skip


def _text_image_inputs(length: int) -> Inputs:
    return {"input_ids": ids(16), "pixel_values": normal(1, 3, 64, 64)}


for _name, _model, _config in (("clip", "CLIPModel", "CLIPConfig"), ("siglip", "SiglipModel", "SiglipConfig")):
    _add(
        Case(
            _name, "vision", _transformer(_model, _config, text_config=dict(_TEXT), vision_config=dict(_VISION)),
            _text_image_inputs, None, "pixel_values", lengths=(TOKENS,),
        )
    )  # fmt: skip
_add(
    Case(
        "sam", "vision",
        _transformer(
            "SamModel", "SamConfig",
            vision_config={"hidden_size": WIDTH, "mlp_dim": INNER, "num_hidden_layers": LAYERS, "output_channels": 256,
                           "num_attention_heads": HEADS, "image_size": 128, "patch_size": 16, "window_size": 4,
                           "global_attn_indexes": [1]},
            prompt_encoder_config={"hidden_size": 256, "image_size": 128, "patch_size": 16},
            mask_decoder_config={"hidden_size": 256, "mlp_dim": 512, "iou_head_hidden_dim": 256},
        ),
        lambda length: {"pixel_values": normal(1, 3, 128, 128), "input_points": normal(1, 1, 2, 2).abs() * 32},
        None, "pixel_values", lengths=(TOKENS,),
    )
)  # fmt: skip
_add(
    Case(
        "whisper", "audio",
        _transformer("WhisperForConditionalGeneration", "WhisperConfig", **{
            **_BART, "max_position_embeddings": 256, "max_source_positions": 50, "max_target_positions": 256,
            "num_mel_bins": 80, "suppress_tokens": None, "begin_suppress_tokens": None}),
        lambda length: {"input_features": normal(1, 80, 100), "decoder_input_ids": ids(length), "use_cache": False},
        lambda: {"input_features": normal(1, 80, 100), "decoder_input_ids": ids(4)}, "input_features",
    )
)  # fmt: skip
_add(
    Case(
        "wav2vec2", "audio",
        _transformer("Wav2Vec2ForCTC", "Wav2Vec2Config", vocab_size=32, hidden_size=WIDTH, num_hidden_layers=LAYERS,
                     num_attention_heads=HEADS, intermediate_size=INNER, conv_dim=[128] * 7,
                     num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, apply_spec_augment=False),
        lambda length: {"input_values": normal(1, 16000)}, None, "input_values", lengths=(TOKENS,),
    )
)  # fmt: skip

TRANSFORMERS = tuple(CASES)


# --- torch.nn ----------------------------------------------------------------------------------------------------


def _torch_nn(name: str, make: Callable[[], nn.Module], inputs: Callable[[int], Inputs], by: str) -> None:
    _add(Case(name, "torch.nn", lambda: make().eval(), inputs, None, by, package="torch"))


def _encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, batch_first=True)


_torch_nn("nn.TransformerEncoderLayer", _encoder_layer, lambda length: {"src": normal(1, length, WIDTH)}, "src")
_torch_nn(
    "nn.TransformerEncoder", lambda: nn.TransformerEncoder(_encoder_layer(), LAYERS),
    lambda length: {"src": normal(1, length, WIDTH)}, "src",
)  # fmt: skip
_torch_nn(
    "nn.TransformerDecoderLayer", lambda: nn.TransformerDecoderLayer(WIDTH, HEADS, INNER, batch_first=True),
    lambda length: {"tgt": normal(1, length, WIDTH), "memory": normal(1, TOKENS, WIDTH)}, "tgt",
)  # fmt: skip
_torch_nn(
    "nn.Transformer", lambda: nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, INNER, batch_first=True),
    lambda length: {"src": normal(1, TOKENS, WIDTH), "tgt": normal(1, length, WIDTH)}, "tgt",
)  # fmt: skip


class Mlp(nn.Module):
    """Two linears with a GELU, for torchao's formats; ``forward`` takes one floating argument ``x`` [.., WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


_torch_nn("nn.Sequential", Mlp, lambda length: {"x": normal(1, length, WIDTH)}, "x")


# --- PEFT --------------------------------------------------------------------------------------------------------


def _lora(model: nn.Module) -> nn.Module:
    """Return the model with LoRA adapters that change its outputs."""
    peft: Any = importlib.import_module("peft")
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"],
                             init_lora_weights=False)  # fmt: skip
    adapted: nn.Module = peft.get_peft_model(model, config).eval()
    return adapted


def _lora_merged(model: nn.Module) -> nn.Module:
    adapted: Any = _lora(model)
    merged: nn.Module = adapted.merge_and_unload().eval()
    return merged


_LLAMA_MODEL = CASES["llama"].make
_add(Case("peft: adapters active", "PEFT", _LLAMA_MODEL, _decoder_inputs, _prompt, "inputs_embeds", change=_lora,
          package="peft", extra=("merge",)))  # fmt: skip
_add(Case("peft: added to an optimized model", "PEFT", _LLAMA_MODEL, _decoder_inputs, _prompt, "inputs_embeds",
          change=_lora, optimize_first=True, package="peft", extra=("merge",)))  # fmt: skip
_add(Case("peft: merged before", "PEFT", _LLAMA_MODEL, _decoder_inputs, _prompt, "inputs_embeds",
          change=_lora_merged, package="peft"))  # fmt: skip


# --- torchao -----------------------------------------------------------------------------------------------------


def _quantised(config: str, **values: Any) -> Callable[[nn.Module], nn.Module]:
    """Return a ``change`` by ``torchao.quantization.quantize_``. A value ``PerGroup.32`` stands for
    ``PerGroup(32)``."""

    def change(model: nn.Module) -> nn.Module:
        quantization: Any = importlib.import_module("torchao.quantization")
        arguments = dict(values)
        for name, value in values.items():
            kind, _, size = value.partition(".") if isinstance(value, str) else ("", "", "")
            if size:
                arguments[name] = getattr(quantization, kind)(int(size))
        quantization.quantize_(model, getattr(quantization, config)(**arguments))
        return model

    return change


TORCHAO: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Int8WeightOnly": ("Int8WeightOnlyConfig", {}),
    "Int8DynamicActivationInt8Weight": ("Int8DynamicActivationInt8WeightConfig", {}),
    "Int4WeightOnly (tile_packed_to_4d)": (
        "Int4WeightOnlyConfig", {"group_size": GROUP, "int4_packing_format": "tile_packed_to_4d"},
    ),
    "Int4WeightOnly (plain_int32)": (
        "Int4WeightOnlyConfig", {"group_size": GROUP, "int4_packing_format": "plain_int32"},
    ),
    "Int4WeightOnly (plain)": ("Int4WeightOnlyConfig", {"group_size": GROUP}),
    "IntxWeightOnly (int8)": ("IntxWeightOnlyConfig", {"weight_dtype": torch.int8}),
    f"IntxWeightOnly (int4, groups of {GROUP})": (
        "IntxWeightOnlyConfig", {"weight_dtype": INT4, "granularity": f"PerGroup.{GROUP}"},
    ),
    "Int8DynamicActivationIntxWeight": (
        "Int8DynamicActivationIntxWeightConfig", {"weight_dtype": INT4, "weight_granularity": f"PerGroup.{GROUP}"},
    ),
    "Int8DynamicActivationIntxWeight (opaque)": (
        "Int8DynamicActivationIntxWeightConfig",
        {"weight_dtype": INT4, "weight_granularity": f"PerGroup.{GROUP}", "intx_packing_format": "opaque_torchao_auto"},
    ),
    "Float8WeightOnly": ("Float8WeightOnlyConfig", {}),
    "Float8DynamicActivationFloat8Weight": ("Float8DynamicActivationFloat8WeightConfig", {}),
    "Float8DynamicActivationInt4Weight": ("Float8DynamicActivationInt4WeightConfig", {}),
}  # fmt: skip

for _format, (_config, _values) in TORCHAO.items():
    _add(Case(f"torchao: {_format}, llama", "torchao", _LLAMA_MODEL, _decoder_inputs, _prompt, "inputs_embeds",
              change=_quantised(_config, **_values), package="torchao"))  # fmt: skip
    _add(Case(f"torchao: {_format}, nn.Sequential", "torchao", lambda: Mlp().eval(), CASES["nn.Sequential"].inputs,
              None, "x", change=_quantised(_config, **_values), package="torchao"))  # fmt: skip
