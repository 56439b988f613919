"""`areal-q formats`: what it measures, beside computations by hand, and what it says."""

import json
import re
from pathlib import Path

import pytest
import torch
from helpers.commands import run_here
from helpers.paths import REAL_MODEL
from transformers import AutoModelForCausalLM

from areal_q.config import Smoothing, load
from areal_q.config.run import ROUNDS_ACTIVATIONS, WEIGHT_SCALES
from areal_q.errors import TaskError
from areal_q.models import Decoder, DecoderConfig, PackedLayout, init_weights, save_decoder
from areal_q.models.low_bit.quantized_forward import linears
from areal_q.quant import FORMATS, dequantize_state
from areal_q.quant.smoothing import SmoothingScales
from areal_q.tasks import CharTokenizer
from learner.backends.single_device import TorchPolicy
from learner.publishing.version_builder import VersionBuilder
from rollout.evaluation.format_error import AnsweredText, Error, Reference, quantize_only
from rollout.evaluation.format_parts import outliers, parts
from rollout.evaluation.format_texts import answered, read_conversations
from rollout.evaluation.formats import FormatRow, advised, main, measured, shown, to_take

CONFIG = DecoderConfig(
    family="llama", vocab_size=CharTokenizer().vocab_size, width=64, layers=2, heads=4, kv_heads=2,
    head_dim=16, mlp=96, max_positions=64, eos_ids=(1,),
)  # fmt: skip
TEXTS = [AnsweredText([3, 4, 5, 6, 7, 8, 9], 3), AnsweredText([9, 8, 7, 6, 5], 2)]


@pytest.fixture
def model() -> Decoder:
    model = Decoder(CONFIG).requires_grad_(False)
    init_weights(model, seed=3)
    return model


def by_hand(model: Decoder, place: Path, state: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns the figures of the answers' tokens, in float64, by transformers on dequantized weights."""
    save_decoder(model, place / "model")
    theirs = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float64).eval()
    logs = []
    for weights in ({}, state):
        theirs.load_state_dict({n: t.double() for n, t in weights.items()}, strict=False)
        with torch.no_grad():
            logs.append(
                [
                    theirs(torch.tensor([t.ids])).logits[0, t.prompt - 1 : -1].log_softmax(-1)
                    for t in TEXTS
                ]
            )
    p, q = (torch.cat(x) for x in logs)
    token = torch.tensor([i for t in TEXTS for i in t.ids[t.prompt :]])[:, None]
    log_r = (q - p).gather(1, token)
    return {
        "error_mean": float(log_r.abs().mean()),
        "error_max": float(log_r.abs().max()),
        "kl": float((q.exp() * (q - p)).sum(-1).mean()),
        "k3": float((log_r.exp() - 1 - log_r).mean()),
        "top1": float((q.argmax(-1) == p.argmax(-1)).double().mean()),
    }


@pytest.mark.parametrize("format", ["int4", "nf4", "bf16"])
def test_error_of_a_weight_only_format_is_as_by_hand(model, tmp_path, format: str):
    reference = Reference(model, TEXTS)
    published = reference.published(format)
    found = reference.error_of(reference.policy(published, format))
    wanted = by_hand(model, tmp_path, dequantize_state(published, format))
    for name, value in wanted.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-3, abs=2e-6), name
    assert found.noise_max < 1e-4


def test_a_part_alone_leaves_the_others_in_full_precision(model, tmp_path):
    reference = Reference(model, TEXTS)
    found = {part.name: part.error for part in parts(reference, "int4")}
    state = dequantize_state(reference.published("int4"), "int4")
    wanted = by_hand(model, tmp_path, {n: t for n, t in state.items() if "down_proj" in n})
    assert found["down_proj"].error_mean == pytest.approx(wanted["error_mean"], rel=1e-3)
    assert {"q_proj", "o_proj", "layer 0", "layer 1"} < {*found}
    policy = reference.policy(reference.published("int4"), "int4")
    quantize_only(policy, model, (), {})
    assert reference.error_of(policy).error_max < 1e-5


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_parts_of_smoothed_weights_leave_the_others_as_they_are(model, format):
    reference = Reference(model, TEXTS)
    folds = reference.folds(format, Smoothing())
    policy = reference.policy(reference.published(format, folds), format)
    whole = reference.error_of(policy)
    quantize_only(policy, model, (), folds)
    assert reference.error_of(policy).error_max < 1e-5
    quantize_only(policy, model, linears(policy), folds)
    assert reference.error_of(policy) == whole
    plain, smoothed = (
        {part.name: part.error for part in parts(reference, format, settings)}
        for settings in (None, Smoothing())
    )
    assert {*plain} == {*smoothed} and plain["down_proj"] != smoothed["down_proj"]


def test_layers_are_asked_for_by_the_name_of_a_row(tmp_path: Path):
    said = run_here("formats", main, str(tmp_path), "--layers", "nvfp4, smoothed")
    assert said.returncode == 2 and said.stdout == ""
    assert "--layers 'nvfp4, smoothed': none of" in said.stderr and "int8, smoothed;" in said.stderr


def test_a_planted_outlier_is_found_where_it_is(model):
    model.model.embed_tokens.weight[4] *= 1000
    model.model.layers[0].self_attn.o_proj.weight.zero_()
    model.model.layers[0].post_attention_layernorm.weight.fill_(1.0)
    model.model.layers[0].mlp.up_proj.weight[5].fill_(0.0)
    model.model.layers[0].mlp.up_proj.weight[5, 0] = 50.0
    model.model.layers[0].mlp.gate_proj.weight[5] = model.model.embed_tokens.weight[4] / 10
    first = outliers(Reference(model, TEXTS))[0]
    assert (first.position, first.token) == (1, 4) and first.linear.endswith(
        "layers.0.mlp.down_proj"
    )


def test_smoothed_rows_are_of_what_a_learner_publishes_first(model):
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight[5] *= 200
    reference = Reference(model, TEXTS)
    run = load(None, ["rollout.format=int8", "rollout.smoothing={}", "rollout.unquantized=fp32"])
    policy = TorchPolicy(model, run.learner, 1.0)
    policy.smoothing = SmoothingScales(Smoothing(), CONFIG.head_dim)
    prompts = torch.tensor([i for t in TEXTS for i in t.ids[: t.prompt]])
    policy.smooth(prompts, PackedLayout.of([t.prompt for t in TEXTS]))
    first = VersionBuilder(run, smoothing=policy.smoothing).build(model, 0)
    found = reference.published("int8", reference.folds("int8", Smoothing()))
    assert {*found} == {*first.tensors}
    assert all(torch.equal(tensor, first.tensors[name]) for name, tensor in found.items())
    assert not torch.equal(
        found["model.layers.0.post_attention_layernorm.weight"],
        model.model.layers[0].post_attention_layernorm.weight,
    )


def test_every_format_has_a_row_and_a_refusal_is_one_line(model):
    rows = advised(list(measured(Reference(model, TEXTS), speed=False)))
    names = [row.name for row in rows]
    assert names == [
        name
        for format in FORMATS
        for name in (format, f"{format}, smoothed")
        if name == format or format in ROUNDS_ACTIVATIONS + WEIGHT_SCALES
    ]
    assert all(len(shown(row).splitlines()) == 1 and row.says for row in rows)
    sizes = {row.name: row.bytes for row in rows}
    assert sizes["int4"] < sizes["int8"] < sizes["bf16"]


def error(mean: float, noise: float) -> Error:
    return Error(
        error_mean=mean,
        error_max=1.0,
        kl=mean / 5,
        k3=mean / 5,
        top1=0.9,
        noise_mean=noise,
        noise_max=1.0,
    )


def test_the_advice_names_quiet_formats_and_what_was_learnt():
    rows = advised(
        [
            FormatRow(format="bf16", error=error(0.002, 1e-5), bytes=200),
            FormatRow(format="int8", error=error(0.28, 0.27), bytes=100),
            FormatRow(format="int8", smoothed=True, error=error(0.15, 0.12), bytes=100),
            FormatRow(format="weight-only", error=error(0.06, 1e-5), bytes=101),
            FormatRow(format="fp8", error=error(0.3, 0.2), bytes=100),
            FormatRow(format="fp8", smoothed=True, error=error(0.29, 0.2), bytes=100),
            FormatRow(format="four bits", error=error(0.9, 0.2), bytes=50),
            FormatRow(format="int4", error=error(0.9, 1e-5), bytes=90),
            FormatRow(format="int4", smoothed=True, error=error(0.5, 1e-5), bytes=90),
            FormatRow(format="refused", says="not for this model: …"),
        ]
    )
    bf16, int8, smoothed, weight_only, fp8, _, four, int4, awq, refused = (r.says for r in rows)
    quiet = "take rollout.format=weight-only (0.06 off, no noise)"
    assert int8 == quiet.replace("take", "take rollout.smoothing.alpha=0.5 (0.15 off) or")
    assert smoothed == bf16 == "as it is" and fp8 == quiet
    assert four == "take rollout.format=bf16 (0.002 off, no noise)"
    assert int4.endswith("close its error; rollout.smoothing.alpha=0.5 (0.5 off)")
    assert awq.endswith("(learnt with qarl: -0.07)") and "qarl" in weight_only
    assert refused.startswith("not for")
    assert shown(rows[1]).endswith("  -0.05") and shown(rows[4]).endswith("  –")


@pytest.mark.parametrize(("nats", "will"), [(0.19, True), (0.21, False)])
def test_what_was_learnt_elsewhere_holds_no_further_off(nats: float, will: bool):
    rows = [
        FormatRow(format="int8", smoothed=True, error=error(nats, 0.1), bytes=100),
        FormatRow(format="fp8", error=error(0.01, 1e-3), bytes=100),
        FormatRow(format="int8-weight", error=error(0.3, 1e-5), bytes=100),
        FormatRow(format="nf4", error=error(0.7, 1e-5), bytes=50),
        FormatRow(format="int4", smoothed=True, error=error(0.5, 1e-5), bytes=50),
        FormatRow(format="int4-fp8", error=error(0.4, 0.2), bytes=50),
        FormatRow(format="nvfp4", says="not for this model: …"),
    ]
    eight, four = to_take(rows)
    smoothed = ", or rollout.format=int8 rollout.smoothing.alpha=0.5" * will
    assert eight == f"to take in 8 bits, the nearest first: rollout.format=fp8{smoothed}"
    aligned = "rollout.format=int4 rollout.smoothing.alpha=0.5 learner.precision=qarl"
    assert four == f"to take in 4 bits, the nearest first: {aligned}"


def test_conversations_keep_their_answers_and_prompts_get_one(model, tmp_path):
    tokenizer, file = CharTokenizer(), tmp_path / "data.jsonl"
    chat = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    file.write_text("".join(json.dumps(x) + "\n" for x in ({"messages": chat}, {"prompt": "4+5="})))
    given, asked = read_conversations(file, tokenizer, 8)
    assert given.ids[given.prompt :] == [*tokenizer.encode("3"), tokenizer.eos_id]
    first, second = answered(model, [given, asked], frozenset(), 5)
    assert first == given
    assert second.ids[: asked.prompt] == asked.ids and len(second.ids) == asked.prompt + 5
    file.write_text('{"question": 1}\n')
    with pytest.raises(TaskError, match=r"data\.jsonl:1"):
        read_conversations(file, tokenizer, 8)


@pytest.mark.parametrize("messages", [5, ["text"], [{"role": "user", "content": "no digits"}]])
def test_refused_messages_are_named_by_their_line(tmp_path: Path, messages: object):
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    with pytest.raises(TaskError, match=r"data\.jsonl:1: "):
        read_conversations(file, CharTokenizer(), 8)


def test_short_answers_are_as_many_as_a_judgement_needs(model, tmp_path, monkeypatch):
    monkeypatch.setattr("rollout.evaluation.formats.FORMATS", {"bf16": FORMATS["bf16"]})
    save_decoder(model, tmp_path / "model", CharTokenizer())
    data = tmp_path / "data.jsonl"
    row = json.dumps({"prompt": "1+2=", "messages": []}) + "\n"
    options = [str(tmp_path / "model"), str(data), "--no-speed", "--tokens", "3"]
    for rows, more, told in (
        (200, [], r"3\d\d tokens of 128 answers"),
        (10, [], r"warning: \d\d tokens are few to judge by"),
        (200, ["--problems", "4"], r"warning: 1\d tokens are few to judge by"),
    ):
        data.write_text(row * rows)
        said = run_here("formats", main, *options, *more)
        assert said.returncode == 0, said.stderr
        assert re.match(told, said.stdout), said.stdout


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--out", "nowhere/x.json"], "--out nowhere/x.json: its directory is not there"),
        (["--only", "int8,int9"], "--only int8,int9: 'int9' is none of bf16, "),
    ],
)
def test_what_cannot_be_measured_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: list[str], said: str
):
    monkeypatch.chdir(tmp_path)
    done = run_here("formats", main, "model", *option)
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_a_few_formats_are_measured_alone(model, tmp_path):
    save_decoder(model, tmp_path / "model", CharTokenizer())
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "1+2="}) + "\n")
    options = [str(data), "--only", "int4,int8", "--no-speed", "--tokens", "3"]
    done = run_here("formats", main, str(tmp_path / "model"), *options)
    assert done.returncode == 0, done.stderr
    shown_rows = done.stdout.split("what each would take:")[0]
    assert re.findall(r"^(int\S+)", shown_rows, re.M) == ["int8", "int8,", "int4", "int4,"]


def test_what_to_take_says_all_that_it_needs():
    """Without more int8 is smoothed on a pretrained model."""
    row = FormatRow(format="int8", error=error(0.01, 1e-3), bytes=100)
    (told,) = to_take([row])
    assert told.endswith(": rollout.format=int8 rollout.smoothing=off")


QUIET = ["bf16", "int4", "nf4", "nvfp4", "mxfp4"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not REAL_MODEL.is_dir(), reason=f"no models/{REAL_MODEL.name}: make real-model")
def test_a_pretrained_model_is_noisy_in_eight_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of the formats, those that the figures are known of."""
    known = {name: FORMATS[name] for name in ("int8", "int4-g32", *QUIET)}
    monkeypatch.setattr("rollout.evaluation.formats.FORMATS", known)
    out = tmp_path / "formats.json"
    options = ["--no-speed", "--problems", "3", "--tokens", "16", "--out", str(out)]
    said = run_here("formats", main, str(REAL_MODEL), *options)
    assert said.returncode == 0, said.stderr
    found = json.loads(out.read_text())["formats"]
    smoothed = {row["format"]: row["error"] for row in found if row["smoothed"]}
    rows = {row["format"]: row["error"] for row in found if not row["smoothed"]}
    assert {*rows} == {*known} and all(f"\n{name} " in said.stdout for name in known)
    assert {*smoothed} == {*known} & {*ROUNDS_ACTIVATIONS, *WEIGHT_SCALES}
    assert smoothed["int4-g32"]["kl"] < 0.8 * rows["int4-g32"]["kl"]
    assert smoothed["int8"]["error_mean"] < rows["int8"]["error_mean"]
    assert rows["int8"]["noise_mean"] > 0.03
    assert rows["int8"]["noise_mean"] > 0.4 * rows["int8"]["error_mean"]
    assert max(rows[name]["noise_mean"] for name in QUIET) < 1e-3
