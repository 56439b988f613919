"""The variants of a decoder that a Hugging Face `config.json` may ask for: biases, windows, layers without
RoPE; and those that are not implemented."""

from typing import Any

from areal_q.errors import CheckpointError

SILU = ("silu", "swish")
"""The two names by which config.json calls the same activation"""
TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
"""Those of GELU's tanh form"""
ALPHA, LIMIT = 1.702, 7.0
"""Numbers of gpt-oss' clamped SwiGLU, (up + 1) · gate · σ(ALPHA · gate), where gate is LIMIT at most and up
within ±LIMIT"""
_WINDOW_BY_LAYER = ("qwen2", "qwen3", "smollm3")
"""Families in which some layers may see a window and others all."""


STATEFUL = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")
"""Families in which most layers keep a state in place of keys and values"""


def text_part(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json of the language model in a Qwen3.5 that sees images too; any other `hf` as it is."""
    sees = hf.get("model_type") in ("qwen3_5", "qwen3_5_moe")
    text = hf.get("text_config") if sees else None
    if not isinstance(text, dict):
        return hf
    shared = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
    return {key: hf[key] for key in shared if key in hf} | text


def not_implemented(family: str, hf: dict[str, Any]) -> dict[str, bool]:
    """Returns, by name, whether `hf` asks for a variant that this decoder does not have: one that transformers
    would compute differently, or with other weights."""
    known_kinds = {
        "full_attention",
        "linear_attention" if family in STATEFUL else "sliding_attention",
    }
    kinds = {*(hf.get("layer_types") or ())} - known_kinds
    slides = "sliding_attention" in (hf.get("layer_types") or ())
    by_layer = family in _WINDOW_BY_LAYER and hf.get("use_sliding_window")
    by_layer = by_layer or family in ("gemma3_text", "gpt_oss")
    name, known = ("hidden_activation", TANH) if family == "gemma3_text" else ("hidden_act", SILU)
    of_gemma = ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention")
    quantized = hf.get("quantization_config")
    read = family == "gpt_oss" and isinstance(quantized, dict) and quantized.get("quant_method")
    clamped = {"swiglu_alpha": ALPHA, "swiglu_limit": LIMIT}
    return {
        f"{name} {hf.get(name)!r}": hf.get(name, known[0]) not in known,
        **{key: family == "gemma3_text" and bool(hf.get(key)) for key in of_gemma},
        **{
            f"{key} {hf.get(key)!r}": family == "gpt_oss" and hf.get(key, usual) != usual
            for key, usual in clamped.items()
        },
        f"layer_types {', '.join(sorted(map(str, kinds)))}": bool(kinds),
        "layer_types sliding_attention": slides and not by_layer,
        "use_sliding_window": family == "qwen2_moe" and bool(hf.get("use_sliding_window")),
        "is_causal false": hf.get("is_causal", True) is False,
        "quantization_config, weights that are quantized already,": bool(quantized)
        and read != "mxfp4",
    }


def biases_of(family: str, hf: dict[str, Any]) -> dict[str, Any]:
    """Returns which linears have biases. A flag that transformers does not read in a family is passed over."""
    if family in ("qwen2", "mistral"):
        return {"qkv_bias": family == "qwen2"}
    if family == "qwen2_moe":
        return {"qkv_bias": bool(hf.get("qkv_bias", True))}
    if family == "gpt_oss":
        attention = bool(hf.get("attention_bias", True))
        return {"qkv_bias": attention, "o_bias": attention, "mlp_bias": True}
    qkv = bool(hf.get("attention_bias", family == "seed_oss"))
    out = bool(hf.get("attention_out_bias")) if family == "seed_oss" else qkv
    has_mlp = family in ("llama", "smollm3", "seed_oss") and bool(hf.get("mlp_bias"))
    return {"qkv_bias": qkv, "o_bias": out, "mlp_bias": has_mlp}


def unrotated_of(family: str, hf: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Returns the layers without RoPE: in SmolLM3, those with a 0 in `no_rope_layers`, or else every fourth."""
    if family != "smollm3":
        return ()
    every = hf.get("no_rope_layer_interval") or 4
    rotated = hf.get("no_rope_layers") or [(i + 1) % every for i in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers:
        raise CheckpointError(f"no_rope_layers names fewer than {layers} layers")
    return tuple(i for i in range(layers) if not rotated[i])


def state_layers_of(hf: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Returns the layers that keep a state: those that `layer_types` calls linear attention, or all but every
    fourth."""
    every = hf.get("full_attention_interval") or 4
    if kinds := hf.get("layer_types"):
        return tuple(i for i, kind in enumerate(kinds[:layers]) if kind == "linear_attention")
    return tuple(i for i in range(layers) if (i + 1) % every)


def windows_of(
    family: str, hf: dict[str, Any], layers: int, unrotated: tuple[int, ...]
) -> tuple[int | None, tuple[int, ...]]:
    """Returns the window and the layers that see no more than it. A window that is not switched on, or begins
    after the last layer, is none. `layer_types` takes precedence over `max_window_layers`. Raises
    CheckpointError for a window that is no number."""
    switched = family in ("mistral", "gemma3_text", "gpt_oss") or (
        hf.get("use_sliding_window") and family not in ("llama", "seed_oss", *STATEFUL)
    )
    usual = {"smollm3": None, "gpt_oss": 128}.get(family, 4096)
    window = hf.get("sliding_window", usual) if switched else None
    if window is None:
        return None, ()
    if not isinstance(window, int) or window < 1:
        raise CheckpointError(f"sliding_window = {window!r}")
    if family in ("mistral", "qwen3_moe"):
        return window, tuple(range(layers))
    kinds = hf.get("layer_types")
    if kinds:
        sliding = tuple(i for i, kind in enumerate(kinds[:layers]) if kind == "sliding_attention")
    elif family == "smollm3":
        sliding = unrotated
    elif family == "gemma3_text":
        every = hf.get("sliding_window_pattern") or 6
        sliding = tuple(i for i in range(layers) if (i + 1) % every)
    elif family == "gpt_oss":
        sliding = tuple(range(0, layers, 2))
    else:
        sliding = tuple(range(hf.get("max_window_layers", 28), layers))
    return (window, sliding) if sliding else (None, ())
