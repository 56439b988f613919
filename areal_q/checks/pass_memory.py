"""What one forward and backward pass of the learner takes: activations, logits, the head's gradient.

Notation of the formulas: D the model's width, V its vocabulary; N tokens of a micro-batch, in which a group
shares its prompt, except in models that transformers computes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from areal_q.config import HfModel, Run
from areal_q.models import DecoderConfig
from areal_q.models.layer_kinds import CHUNK, DeltaRule
from areal_q.system.disk import size

CPU_BLOCK, GPU_BLOCK = 1 << 22, 1 << 27
"""Logits in a block of the output head (areal_q/models/logprobs.py)"""
_KEPT_EXPONENTIALS = 1 << 29
"""The most exponentials of logits that are kept (areal_q/models/fused/head.py)"""
_FREED, _MOST_FREED = 15, 700e6
"""What the C library keeps of the blocks that passes have freed (areal_q/system/processes.py): the quickstart's
learner came from 0.4 to 1.36 GB within 150 steps, and stayed there for the 270 that followed"""
_BLOCK_COPIES = 3
"""Tensors of a block's size at once: logits, their exponentials, their gradient"""


@dataclass(frozen=True)
class Part:
    """A part of a process's memory. Example: Part("gradients", 2.15e9, "4 · W")"""

    name: str
    nbytes: float
    formula: str
    on_gpu: bool = False
    """True if it lies in a GPU's memory."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt and of a response, on average or at most."""

    prompt: float
    response: float


def microbatch_responses(run: Run, lengths: Lengths) -> float:
    """Returns how many responses one forward and backward pass has at most, or the part of them that is one
    process's where several share their tokens."""
    cfg, one = run.learner, lengths.prompt + lengths.response
    most = min(cfg.groups * cfg.group_size / cfg.minibatches, max(1.0, cfg.pass_tokens / one))
    return most / cfg.context


def keeps_exponentials(run: Run, shape: DecoderConfig, lengths: Lengths) -> bool:
    """Returns True if the head keeps its exponentials for the backward pass, in bfloat16 on a CPU."""
    fused = run.learner.products == "bfloat16" and run.learner.device == "cpu"
    drawn = microbatch_responses(run, lengths) * lengths.response
    return fused and drawn * shape.vocab_size <= _KEPT_EXPONENTIALS


def pass_memory(run: Run, shape: DecoderConfig, lengths: Lengths) -> Iterator[Part]:
    """Yields what a forward pass keeps for its backward pass, and what the head's blocks take."""
    cfg, gpu = run.learner, run.learner.device != "cpu"
    responses = microbatch_responses(run, lengths)
    # A response's last token predicts nothing.
    padded = responses * (lengths.prompt + lengths.response - 1)
    tokens = responses * (lengths.response - 1)
    prompts = math.ceil(responses * cfg.context / cfg.group_size) * lengths.prompt
    tokens += prompts / cfg.context
    if isinstance(run.model, HfModel):
        tokens = padded
    layer, formula = _layer_bytes(run, shape, tokens, padded)
    kept, formula = len(shape.attention_layers) * layer, f"layers · ({formula})"
    if rule := shape.delta:
        each = _delta_bytes(shape, rule, tokens, responses, padded / responses)
        kept, layer = kept + len(rule.layers) * each, max(layer, each)
        formula += f" + {len(rule.layers)} with a state · {each:,.0f}"
    if cfg.recompute:
        kept = 4 * tokens * shape.width * shape.layers + layer
        formula = "4 · N · layers · D, and one layer's own"
    yield Part("activations", kept, formula, gpu)
    if not gpu:
        free = min(_FREED * kept, _MOST_FREED)
        told = f"{_FREED} passes, at most {size(_MOST_FREED)}: seen in long runs"
        yield Part("freed and kept", free, told)
    yield from _head_memory(run, shape, lengths)


def _layer_bytes(run: Run, shape: DecoderConfig, tokens: float, padded: float) -> tuple[float, str]:
    """Returns the bytes that a layer keeps, and their formula.

    In float32, as plain torch keeps them: 7 · D numbers for a token (two norms with their inputs and results,
    o's input) and 4 · mlp (gate, its silu, up, their product); for each token of the `padded` sequences, which
    share no prompt, attention's queries, keys, values and outputs; a process that shares them with others has
    keys and values of one whole head at least. The fused pass in bfloat16 keeps gate and up in two bytes, the
    residual stream in four (areal_q/models/fused/trunk.py)."""
    heads = shape.heads * shape.head_dim
    mlp = shape.active_mlp
    fused = run.learner.products == "bfloat16" and run.learner.precision == "full"
    if fused and not shape.delta and not isinstance(run.model, HfModel):
        return tokens * (4 * mlp + 16 * shape.width + 4 * heads), "N · (4 · mlp + 16 · D + 4 · q)"
    kv_heads = max(shape.kv_heads, run.learner.context)
    attention = padded * 2 * (heads + kv_heads * shape.head_dim)
    numbers = tokens * (7 * shape.width + 4 * mlp) + attention
    return 4 * numbers, "4 · N · (7 · D + 4 · mlp) + 4 · padded tokens · (q + k + v + out)"


def _delta_bytes(
    shape: DecoderConfig, rule: DeltaRule, tokens: float, rows: float, length: float
) -> float:
    """Returns the bytes that a layer with a state keeps (areal_q/models/layers/gated_delta.py), as torch keeps
    them: for a token 7 · D + 4 · mlp numbers, and what its heads found in five forms; for each token of the
    `rows` of so many tokens, which share no prompt, 3 numbers of a channel about the convolution, and for
    each of its heads 6 of a key, 3 of a value and 7 for each token of its chunk; a state for each chunk."""
    chunk = min(CHUNK, length)
    chunks = math.ceil(length / chunk)
    each = 6 * rule.key_dim + 3 * rule.value_dim + 7 * chunk
    of_heads = rule.value_heads * chunks * (chunk * each + rule.key_dim * rule.value_dim)
    of_token = 7 * shape.width + 4 * shape.active_mlp + 5 * rule.value_heads * rule.value_dim
    return 4 * (tokens * of_token + rows * (3 * length * rule.channels + of_heads))


def _head_memory(run: Run, shape: DecoderConfig, lengths: Lengths) -> Iterator[Part]:
    cfg, gpu = run.learner, run.learner.device != "cpu"
    drawn = microbatch_responses(run, lengths) * lengths.response
    block = min(drawn * shape.vocab_size, GPU_BLOCK if gpu else CPU_BLOCK)
    nbytes, told = _BLOCK_COPIES * 4 * block, f"{_BLOCK_COPIES} · 4 · {block:.3g} in a block"
    if keeps_exponentials(run, shape, lengths):
        nbytes += 2 * drawn * shape.vocab_size
        told += f", 2 · {drawn * shape.vocab_size:.3g} kept"
    yield Part("logits", nbytes, told, gpu)
    if not cfg.lora:
        told = "8 · V · D, of head and embedding before they are added"
        yield Part("the head's gradient", 8 * shape.vocab_size * shape.width, told, gpu)
