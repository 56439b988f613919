"""What is left of a format's error if the linears that cause most of it stay in 16 bits, and what rounding at
random does to it (both proposed in verl-recipe#134).

    python -m bench.learner.sixteen_bits          # after `make real-model`; a few CPU minutes

Error, KL, k3 and noise as by `areal-q formats`, on the model's own answers to its prompts, with the scales by
channel that rollouts have. A linear in 16 bits has its weights and inputs in full precision. What came out:
docs/aligned.md.
"""

import argparse
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from areal_q.config import Smoothing
from areal_q.linear import quantized_linear
from areal_q.models import load_decoder
from areal_q.models.low_bit.quantized_forward import linears
from areal_q.quant import FORMATS, is_quantized
from areal_q.quant.activations import quantize_rows
from areal_q.quant.format import Ranges
from areal_q.quant.rescaling import Fold
from bench.common import ROOT, say, table
from rollout.evaluation.format_error import Error, Reference, quantize_only
from rollout.evaluation.format_parts import parts
from rollout.evaluation.format_texts import answered
from rollout.evaluation.formats import prepared

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
COUNTS = (0, 1, 2, 4, 8)
"""How many linears stay in 16 bits, the worst first"""
FEW = 1
"""Texts on which the linears are ranked"""
SEEDS = 2
KINDS = ("v_proj", "down_proj")
"""All of a kind that stay in 16 bits"""
HEADER = ("format", "in 16 bits, or rounded at random", "error", "KL", "k3", "noise", "MB more")


def line(format: str, what: str, error: Error, more: float = 0.0) -> tuple[str, ...]:
    figures = (error.error_mean, error.kl, error.k3, error.noise_mean)
    return (format, what, *(f"{x:.3f}" for x in figures), f"{more:.2f}")


def kept(
    reference: Reference, few: Reference, format: str, folds: Mapping[str, Fold]
) -> Iterator[tuple[str, ...]]:
    """Yields a line for each choice of linears that stay in 16 bits. The worst have the largest product of two
    KLs, of their kind and of their layer alone in the format, on a few of the texts."""
    alone = {part.name: part.error.kl for part in parts(few, format, Smoothing())}
    say(f"{format}: {', '.join(f'{name} {kl:.4f}' for name, kl in alone.items())}")
    policy = reference.policy(reference.published(format, folds), format)
    names = [*linears(policy)]

    def score(name: str) -> float:
        return alone[name.rpartition(".")[2]] * alone[f"layer {name.split('.')[2]}"]

    ranked = sorted(names, key=score, reverse=True)
    say(f"{format}, worst: {', '.join(ranked[:8])}")
    choices = {f"the worst {n}": ranked[:n] for n in COUNTS}
    choices |= {f"all {kind}": [n for n in ranked if n.endswith(kind)] for kind in KINDS}
    weights = reference.model.state_dict()
    bits = 8 if "8" in format else 4
    for what, chosen in choices.items():
        quantize_only(policy, reference.model, {*names} - {*chosen}, folds)
        more = sum(weights[f"{name}.weight"].numel() for name in chosen) * (16 - bits) / 8e6
        yield line(format, what, reference.error_of(policy), more)


def random_weights(
    reference: Reference, format: str, folds: Mapping[str, Fold], seed: int
) -> dict[str, Tensor]:
    """Returns what is published if each weight becomes one of the two numbers around it, at random, with its
    mean: nearest rounding of the weight plus a uniform number of half a step to each side."""
    generator, chosen = torch.Generator().manual_seed(seed), FORMATS[format]
    published = reference.published(format, folds)
    for name, weight in reference.model.state_dict().items():
        if not is_quantized(name):
            continue
        fold = folds[name]
        scaled = fold.of(weight)
        ranges = chosen.ranges(scaled)
        assert ranges is not None
        if fold.clip is not None:
            ranges = Ranges(ranges.blocks * fold.clip, ranges.whole)
        step = chosen.quantize(scaled, name, ranges)["weight_scale"].float()
        group = getattr(chosen, "group", scaled.shape[1])
        step = step.repeat_interleave(group, 1)[:, : scaled.shape[1]]
        nudge = torch.rand(scaled.shape, generator=generator) - 0.5
        parts = chosen.quantize(scaled + nudge * step, name, ranges)
        published.update({name.removesuffix("weight") + k: part for k, part in parts.items()})
    return published


def random_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 per row, as `quantize_rows`, but each number goes up or down at random, with its mean."""
    _, scale = quantize_rows(x)
    codes = (x / scale + torch.rand_like(x)).floor().clamp(-127, 127)
    return codes.to(torch.int8), scale


def at_random(
    reference: Reference, format: str, folds: Mapping[str, Fold]
) -> Iterator[tuple[str, ...]]:
    for seed in range(SEEDS):
        policy = reference.policy(random_weights(reference, format, folds, seed), format)
        yield line(format, f"weights at random, seed {seed}", reference.error_of(policy))
    if format == "int8":
        policy = reference.policy(reference.published(format, folds), format)
        torch.manual_seed(0)
        with mock.patch.object(quantized_linear, "quantize_rows", random_rows):
            yield line(format, "activations at random", reference.error_of(policy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--formats", default="int8,int4")
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    path, tokenizer, texts = prepared(args.model, None, args.problems)
    model = load_decoder(path).requires_grad_(False)
    texts = answered(model, texts, frozenset(tokenizer.stops), args.tokens)
    reference, few = Reference(model, texts), Reference(model, texts[:FEW])
    lines = []
    for format in args.formats.split(","):
        folds = reference.folds(format, Smoothing())
        for found in chain(
            at_random(reference, format, folds), kept(reference, few, format, folds)
        ):
            say(" | ".join(found))
            lines.append(found)
    print(table(HEADER, lines))


if __name__ == "__main__":
    main()
