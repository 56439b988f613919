"""`areal-q formats MODEL [DATA]`: what each number format costs this model, before a run is begun with it.

    areal-q formats models/SmolLM2-135M-Instruct
    areal-q formats MODEL --only int8,int8-weight
    areal-q formats runs/sums --layers int8

Each line appears as soon as it is measured. docs/aligned.md says what the columns mean for a run.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec import Struct

from areal_q.checks.format_advice import falls_behind, study_of
from areal_q.config import Chat, Smoothing
from areal_q.config.run import ROUNDS_ACTIVATIONS, WEIGHT_SCALES, WORTH_SMOOTHING
from areal_q.errors import ConfigError, QuantizationError
from areal_q.models import Decoder, load_decoder
from areal_q.models.hf.vllm_shapes import vllm_refuses
from areal_q.quant import FORMATS
from areal_q.quant.state_dict import rest_in_bf16
from areal_q.system.files import write_whole
from areal_q.tasks import Tokenizer, build_task, build_tokenizer, load_tokenizer
from rollout.evaluation.format_error import AnsweredText, Error, Reference
from rollout.evaluation.format_parts import Outlier, PartError, outliers, parts
from rollout.evaluation.format_texts import PROMPTS, answered, decoding_pace, read_conversations
from rollout.evaluation.questions import settings_of

SMALL_NATS = 0.03
"""Error or noise below which a format needs no remedy: the default of learner.fidelity.bound_nats"""
FIRST, MOST = 8, 256
"""Prompts that are answered at first, and of a run's held-out problems at most"""
ENOUGH = 256
"""Tokens of answers below which the figures may be chance, so that more prompts are answered"""
LEARNT_NATS = 0.2
"""Largest error with which SmolLM2-135M learnt what it learns with bf16 (docs/stability.md)"""
SMOOTH = f"rollout.smoothing.alpha={Smoothing().alpha}"
PAYS = 0.8
"""Share of the error that smoothing may leave to be worth its settings"""
HEAD = (
    f"{'format':<22}{'error':>7}{'largest':>9}{'KL':>10}{'k3':>9}{'top-1':>8}{'noise':>8}{'largest':>9}"
    f"{'MB':>7}{'tokens/s':>10}{'learnt':>8}"
)
LEGEND = """error, KL and noise in nats a token, beside the model in full precision; top-1: likeliest for both
noise: what float32's own rounding becomes, which no kernel and no alignment removes
learnt: accuracy of SmolLM2-135M after training on such rollouts, less that with bf16 (docs/stability.md)"""


class FormatRow(Struct, frozen=True, kw_only=True):
    """One format; `error` is None where `says` is why the model cannot take it."""

    format: str
    smoothed: bool = False
    """True for scales by channel, as `rollout.smoothing` publishes them"""
    error: Error | None = None
    bytes: int = 0
    """Size of all published tensors, with those that are not quantized in bfloat16"""
    tokens_per_s: float | None = None
    """Pace of decoding with eight responses at once; None if it was not measured, as that of a smoothed row,
    which runs the same kernels"""
    says: str = ""
    """What it would take to use the format"""

    @property
    def name(self) -> str:
        return f"{self.format}, smoothed" if self.smoothed else self.format


class Report(Struct, frozen=True, kw_only=True):
    """What `--out` holds."""

    model: str
    texts: int
    tokens: int
    formats: list[FormatRow]
    layers: str | None
    parts: list[PartError]
    outliers: list[Outlier]


Layers = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT", help='show which linears cause the error of a row: "int8, smoothed"'
    ),
]


Only = Annotated[
    str, typer.Option(metavar="FORMATS", help="these alone: int8,int8-weight; default: all")
]


def main(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="a run's directory, or a model in Hugging Face layout"
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Argument(metavar="[DATA]", help="JSONL of prompts or conversations to measure on"),
    ] = None,
    layers: Layers = None,
    speed: Annotated[bool, typer.Option(help="measure the pace of decoding")] = True,
    only: Only = "",
    problems: Annotated[
        int | None,
        typer.Option(min=1, help=f"prompts, at most; default: {FIRST}, more if answers are short"),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="of an answer, at most")] = 48,
    out: Annotated[Path | None, typer.Option(help="file for all figures, as JSON")] = None,
) -> None:
    """Compares the number formats on MODEL: error, KL, noise, bytes, pace, and what each would take."""
    chosen = _chosen(only, layers, out)
    path, tokenizer, asked = prepared(model, data, problems or MOST)
    decoder = load_decoder(path).requires_grad_(False)
    stops = frozenset(tokenizer.stops)
    texts, count = _enough(decoder, asked, problems or FIRST, stops, tokens)
    reference = Reference(decoder, texts)
    rows, found, far = [], [], []
    if layers is None:
        typer.echo(f"{count} tokens of {len(texts)} answers\n{LEGEND}\n{HEAD}")
        rows = _show_formats(reference, speed, chosen)
    else:
        found, far = _show_layers(reference, layers, tokenizer)
    if out:
        report = Report(
            model=str(model), texts=len(texts), tokens=count, formats=rows, layers=layers,
            parts=found, outliers=far,
        )  # fmt: skip
        write_whole(out, msgspec.json.format(msgspec.json.encode(report)))


def _chosen(only: str, layers: str | None, out: Path | None) -> list[str]:
    """Returns the formats to measure. Raises ConfigError for a name that is none, and for a file that cannot be
    written, before minutes of work."""
    if layers is not None and layers not in named_rows():
        raise ConfigError(f"--layers {layers!r}: none of {'; '.join(named_rows())}")
    chosen = only.split(",") if only else list(FORMATS)
    for format in chosen:
        if format not in FORMATS:
            raise ConfigError(f"--only {only}: {format!r} is none of {', '.join(FORMATS)}")
    if out and not os.access(out.parent, os.W_OK):
        raise ConfigError(f"--out {out}: its directory is not there, or cannot be written to")
    return chosen


def _enough(
    decoder: Decoder, asked: Sequence[AnsweredText], more: int, stops: frozenset[int], tokens: int
) -> tuple[list[AnsweredText], int]:
    """Returns the first `more` of `asked` with the model's answers of at most so many tokens, and further ones
    until there is enough to judge by; and the number of tokens of all answers."""
    texts, count = list[AnsweredText](), 0
    while asked and count < ENOUGH:
        texts += answered(decoder, asked[:more], stops, tokens)
        asked, more = asked[more:], len(texts)
        count = sum(len(text.ids) - text.prompt for text in texts)
    if count < ENOUGH:
        typer.echo(f"warning: {count} tokens are few to judge by: DATA with more or longer answers")
    return texts, count


def _show_formats(reference: Reference, speed: bool, chosen: Sequence[str]) -> list[FormatRow]:
    """Prints a row for each format as it is measured, then what each would take. Returns the rows."""
    rows = []
    for row in measured(reference, speed, chosen):
        typer.echo(shown(row))
        rows.append(row)
    rows = advised(rows)
    typer.echo("what each would take:")
    for row in rows:
        typer.echo(f"{row.name:<24}{row.says}")
    for line in to_take(rows):
        typer.echo(line)
    return rows


def prepared(
    model: Path, data: Path | None, problems: int
) -> tuple[Path, Tokenizer, list[AnsweredText]]:
    """Returns the model's directory, its tokenizer, and texts: those of `data`, else held-out problems of the
    run, else PROMPTS."""
    if any((d / "config.toml").is_file() for d in (model, model.parent)):
        run, path = settings_of(model, None, None, [])
        tokenizer = build_tokenizer(run.model, run.task)
        asked = [problem.asked for problem in build_task(run.task).heldout[:problems]]
    else:
        path, asked = model, list(PROMPTS[:problems])
        try:
            tokenizer = load_tokenizer(path, Chat())
        except ConfigError:  # a base model has no chat template
            tokenizer = load_tokenizer(path)
    if data:
        return path, tokenizer, read_conversations(data, tokenizer, problems)
    ids = [tokenizer.encode_prompt(one) for one in asked]
    return path, tokenizer, [AnsweredText(one, len(one)) for one in ids]


def named_rows() -> dict[str, tuple[str, Smoothing | None]]:
    """Returns each format, and each that may be smoothed once more, by the name of its row."""
    rows: dict[str, tuple[str, Smoothing | None]] = {}
    for format in FORMATS:
        rows[format] = format, None
        if format in ROUNDS_ACTIVATIONS + WEIGHT_SCALES:
            rows[f"{format}, smoothed"] = format, Smoothing()
    return rows


def measured(
    reference: Reference, speed: bool, chosen: Sequence[str] = tuple(FORMATS)
) -> Iterator[FormatRow]:
    """Yields a row for each format of `chosen`, and for each that may be smoothed a second one."""
    refused = ""
    for format, smoothing in named_rows().values():
        if format == refused or format not in chosen:
            continue
        try:
            published = reference.published(format, reference.folds(format, smoothing))
        except QuantizationError as error:
            yield FormatRow(format=format, says=f"not for this model: {error}")
            refused = format
            continue
        timed = speed and smoothing is None
        yield FormatRow(
            format=format,
            smoothed=smoothing is not None,
            error=reference.error_of(reference.policy(published, format)),
            bytes=sum(t.nbytes for t in rest_in_bf16(published, format).values()),
            tokens_per_s=decoding_pace(reference.model, published, format) if timed else None,
            says=vllm_refuses(reference.model.config, format) or "",
        )


def advised(rows: Sequence[FormatRow]) -> list[FormatRow]:
    """Returns the rows with what each format would take, which depends on the others."""
    return [msgspec.structs.replace(row, says=_advice(row, rows)) for row in rows]


def _advice(row: FormatRow, rows: Sequence[FormatRow]) -> str:
    e = row.error
    if e is None:
        return row.says
    if will_do(row):
        text = "as it is"
    elif e.noise_mean > SMALL_NATS:
        text = f"take {' or '.join(_better(row, e, rows)) or 'a format of 16-bit activations'}"
    else:
        text = "learner.precision=qarl or learner.lora, which close its error"
        text += "".join(f"; {less}" for less in _smoothed(row, e, rows))
        if study := study_of(aligned := f"{row.name}, aligned"):
            text += f" (learnt with qarl: {study.beside_bf16(aligned):+.2f})"
    return f"{text}; {row.says}" if row.says else text


def will_do(row: FormatRow) -> bool:
    """Returns True if a pretrained model may be expected to learn with the format of `row` what it learns with
    bf16: it is so near, or SmolLM2-135M did and this one is no further off."""
    e = row.error
    if e is None:
        return False
    learnt = bool(study_of(row.name)) and not falls_behind(row.name)
    bound = LEARNT_NATS if learnt else SMALL_NATS
    return e.error_mean <= bound and (learnt or e.noise_mean <= bound)


def to_take(rows: Sequence[FormatRow]) -> Iterator[str]:
    """Yields what to set for a format of eight bits and for one of four, the nearest first: all that will do as
    they are, or else the one whose error an aligned learner closes and is least."""
    for bits in ("8", "4"):
        some = [(row, row.error) for row in rows if bits in row.format.partition("-")[0]]
        near = sorted(((e.error_mean, r, e) for r, e in some if e), key=lambda found: found[0])
        fit = [_settings(row) for _, row, _ in near if will_do(row)]
        quiet = [_settings(row) for _, row, e in near if e.noise_mean <= SMALL_NATS]
        fit = fit or [f"{settings} learner.precision=qarl" for settings in quiet[:1]]
        if fit:
            yield f"to take in {bits} bits, the nearest first: {', or '.join(fit)}"


def _settings(row: FormatRow) -> str:
    by_itself = " rollout.smoothing=off" if row.format in WORTH_SMOOTHING else ""
    return f"rollout.format={row.format}{f' {SMOOTH}' if row.smoothed else by_itself}"


def _better(row: FormatRow, e: Error, rows: Sequence[FormatRow]) -> Iterator[str]:
    """Yields the settings that mend a noisy `row` of error `e`, each with what it leaves: smoothing if it pays,
    and the nearest format without noise, of those of no more bytes if there is one."""
    yield from _smoothed(row, e, rows)
    quiet = [(r, r.error) for r in rows if r.error and r.error.noise_mean < SMALL_NATS / 3]
    quiet = [(r, found) for r, found in quiet if found.kl < e.kl]
    small = [(r, found) for r, found in quiet if r.bytes <= 1.02 * row.bytes] or quiet
    for other, found in sorted(small, key=lambda pair: pair[1].kl)[:1]:
        yield f"{_settings(other)} ({found.error_mean:.2g} off, no noise)"


def _smoothed(row: FormatRow, e: Error, rows: Sequence[FormatRow]) -> Iterator[str]:
    """Yields the setting that smooths `row` of error `e`, with what it leaves, if that pays."""
    for other in rows:
        smoothed = other.error
        if other.format != row.format or not smoothed or row.smoothed or not other.smoothed:
            continue
        if smoothed.error_mean <= PAYS * e.error_mean:
            yield f"{SMOOTH} ({smoothed.error_mean:.2g} off)"


def shown(row: FormatRow) -> str:
    e = row.error
    if e is None:
        return f"{row.name:<22}{row.says}"
    pace = "–" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}"
    study = study_of(row.name)
    learnt = f"{study.beside_bf16(row.name):+.2f}" if study else "–"
    return f"{row.name:<22}{_figures(e)}{row.bytes / 1e6:>7.0f}{pace:>10}{learnt:>8}"


def _figures(e: Error) -> str:
    return (
        f"{e.error_mean:>7.3f}{e.error_max:>9.2f}{e.kl:>10.1e}{e.k3:>9.1e}{e.top1:>8.1%}"
        f"{e.noise_mean:>8.3f}{e.noise_max:>9.2f}"
    )


def _show_layers(
    reference: Reference, name: str, tokenizer: Tokenizer
) -> tuple[list[PartError], list[Outlier]]:
    typer.echo(f"{name} in these linears alone, all else in full precision; nats a token")
    typer.echo(HEAD[: HEAD.index("     MB")])
    found = []
    try:
        for part in parts(reference, *named_rows()[name]):
            typer.echo(f"{part.name:<22}{_figures(part.error)}")
            found.append(part)
    except QuantizationError as error:
        raise ConfigError(f"--layers {name}: not for this model: {error}") from error
    typer.echo(
        "tokens with the largest activations: the largest in its row, and what is usual there"
    )
    far = outliers(reference)
    for one in far:
        token = repr(tokenizer.decode([one.token]))
        typer.echo(
            f"  {one.largest:>10.4g} {one.usual:>10.4g}  token {one.position} {token}  {one.linear}"
        )
    return found, far
