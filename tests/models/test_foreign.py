"""Models that transformers computes: log-probs, gradients and files as transformers itself has them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.kinds import FAMILIES, VOCAB, foreign_config, foreign_model, upright, write_foreign
from helpers.strategies import grouped
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BertConfig, MambaConfig
from transformers.pytorch_utils import Conv1D

from areal_q.errors import CheckpointError, said_by
from areal_q.models import Decoder, PackedLayout, packed_layout, save_decoder
from areal_q.models import logprobs as logprobs_module
from areal_q.models.hf import causal_lm
from areal_q.models.hf.foreign_files import check_foreign_class, load_foreign_config
from areal_q.quant import is_quantized

GROUPS = [(3, (5, 2)), (9, (4,)), (6, (1, 12, 7))]
"""Lengths of prompts and of the responses to each"""
every_family = pytest.mark.parametrize("family", FAMILIES)


def packed() -> tuple[Tensor, PackedLayout, list[Tensor]]:
    """Returns packed ids, their layout, and each whole sequence."""
    generator = torch.Generator().manual_seed(3)
    ids, sequences = [], []
    for prompt, responses in GROUPS:
        own = torch.randint(2, VOCAB, (prompt,), generator=generator)
        ids.append(own)
        for length in responses:
            response = torch.randint(2, VOCAB, (length,), generator=generator)
            ids.append(response)
            sequences.append(torch.cat((own, response)))
    return torch.cat(ids), grouped(GROUPS), sequences


def last_logprobs(model: Decoder) -> Tensor:
    """Log-prob of every token of a response but its first, of all sequences, at temperature 0.7."""
    ids, layout, _ = packed()
    hidden = model(ids, layout)
    starts, targets, at = 0, [], []
    for prompt, responses in GROUPS:
        first = starts + prompt
        for length in responses:
            at += range(first, first + length - 1)
            targets += range(first + 1, first + length)
            first += length
        starts = first
    return model.logprobs(hidden[torch.tensor(at)], ids[torch.tensor(targets)], 0.7)[0]


def oracle_logprobs(net: Any) -> Tensor:
    _, _, sequences = packed()
    lengths = [(prompt, length) for prompt, responses in GROUPS for length in responses]
    parts = []
    for ids, (prompt, length) in zip(sequences, lengths, strict=True):
        logp = (net(input_ids=ids[None]).logits[0] / 0.7).log_softmax(-1)
        places = torch.arange(prompt, prompt + length - 1)
        parts.append(logp[places, ids[places + 1]])
    return torch.cat(parts)


def loaded(path: Path) -> causal_lm.HfDecoder:
    return causal_lm.load_foreign(load_foreign_config(path), path)


@pytest.mark.parametrize(
    ("family", "recompute"),
    [*((family, False) for family in FAMILIES), ("opt", True), ("gemma2", True), ("gptj", True)],
)
def test_log_probs_and_gradients_are_transformers_own(
    family: str, recompute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_layout, "WORTH", 1)
    assert any(bucket.first for bucket in packed()[1].buckets)  # some queries are left out
    monkeypatch.setattr(causal_lm, "BLOCK", 5 * VOCAB)  # several blocks of tokens
    monkeypatch.setattr(logprobs_module, "_WHOLE", 0)
    net = write_foreign(tmp_path, family)
    model = loaded(tmp_path)
    model.recompute_layers(recompute)
    got, want = last_logprobs(model), oracle_logprobs(net)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    weights = torch.linspace(-1, 1, len(got))
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    expected = upright(family, {n: p.grad for n, p in net.named_parameters()})
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        own = found[name].grad
        assert (own is None) == (grad is None), name
        if grad is not None and own is not None:
            torch.testing.assert_close(own, grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", ["phi", "gemma2", "cohere2", "stablelm"])
def test_log_probs_among_ids_heed_all_that_is_behind_the_head(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias, a soft cap, a factor, and a plain head; beside the whole distribution with -inf elsewhere."""
    monkeypatch.setattr(causal_lm, "BLOCK", 3 * VOCAB)  # several blocks of tokens
    write_foreign(tmp_path, family)
    model, found = loaded(tmp_path), list[tuple[Tensor, ...]]()
    ids, layout, _ = packed()
    others = torch.stack([torch.randperm(VOCAB)[:5] for _ in ids])
    others[::2, :2] = -1
    others = others.masked_fill(others == ids[:, None], -1)
    among = torch.cat((others[:, :3], ids[:, None], others[:, 3:]), 1)
    left_out = torch.ones(len(ids), VOCAB + 1, dtype=torch.bool)
    left_out = left_out.scatter_(1, among % (VOCAB + 1), False)[:, :-1]
    for dense in (True, False):
        hidden = model(ids, layout).detach().requires_grad_()
        if dense:
            logits = (model.logits(hidden) / 0.7).masked_fill(left_out, -1e30)
            logprobs, entropy = logprobs_module.of_logits(logits, ids, True)
        else:
            logprobs, entropy = model.logprobs(hidden, ids, 0.7, True, among)
        (logprobs.sum() + entropy.sum()).backward()
        assert hidden.grad is not None
        found.append((logprobs, entropy, hidden.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@every_family
def test_ranks_share_each_layer_and_one_pass_of_all_rows(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_layout, "WORTH", 1)
    write_foreign(tmp_path, family)
    model, passes = loaded(tmp_path), list[int]()
    want, buckets = last_logprobs(model), len(packed()[1].buckets)
    layers = model.prepare_sharding()
    assert len(layers) == model.config.layers
    model.net.base_model.register_forward_pre_hook(lambda *_: passes.append(1))
    torch.testing.assert_close(last_logprobs(model), want, atol=1e-5, rtol=1e-5)
    assert len(passes) == 1 < buckets


@pytest.mark.timeout(120)  # compiles kernels, where none are cached
@pytest.mark.parametrize("family", ["gpt_neox", "phi", "gemma2"])
def test_a_pass_in_bfloat16_is_near_and_has_gradients(family: str, tmp_path: Path) -> None:
    """A plain head, one with a bias and one with a soft cap."""
    write_foreign(tmp_path, family)
    model = loaded(tmp_path)
    want = last_logprobs(model).detach()
    model.dtype = torch.bfloat16
    got = last_logprobs(model)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, atol=0.2, rtol=0)
    got.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("error", [TypeError("no such argument"), ImportError("needs more")])
def test_what_transformers_cannot_build_is_one_line(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_foreign(tmp_path, "phi")
    config, asked = load_foreign_config(tmp_path), dict[str, Any]()

    def from_pretrained(path: str, **options: Any) -> Any:
        asked.update(options)
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(CheckpointError, match=str(error)):
        causal_lm.load_foreign(config, tmp_path)
    assert asked["use_safetensors"]  # a pickle beside them is never read
    assert "transformers_version" not in config.to_hf()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"hidden_act": None},
            "for field 'hidden_act': TypeError: Field 'hidden_act' expected str",
        ),
        (
            {"rope_scaling": {"type": "su", "factor": 2.0}, "rope_parameters": None},
            "'su' is not known",
        ),
    ],
)
def test_what_transformers_refuses_is_told_whole(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write_foreign(tmp_path, "phi")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=said):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("\n  of a field:\n\n    it is odd\nmore"), "of a field: it is odd"),
        (ValueError("at its end:"), "at its end:"),
        (RuntimeError(), "RuntimeError"),
        (KeyError("su"), "'su' is not known"),
        (KeyError("Missing keys: {'factor'}"), "Missing keys: {'factor'}"),
    ],
)
def test_an_error_of_a_library_is_one_line(error: Exception, said: str) -> None:
    assert said_by(error) == said


@every_family
def test_an_export_is_loaded_with_the_same_logits(family: str, tmp_path: Path) -> None:
    net = write_foreign(tmp_path / "model", family)
    model = loaded(tmp_path / "model")
    save_decoder(model, tmp_path / "export")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    ids = torch.arange(2, 12)[None]
    torch.testing.assert_close(again(input_ids=ids).logits, net(input_ids=ids).logits)
    before = dict(net.named_parameters())
    assert all(torch.equal(p, before[name]) for name, p in again.named_parameters())
    modes = {file.stat().st_mode for file in (tmp_path / "export").iterdir()}
    assert len(modes) == 1, "others may read its weights where they may read its config.json"
    state = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    every = {tensor.data_ptr() for tensor in model.net.state_dict().values()}
    assert len(state) == len(every) and {*state.values()} == every


def test_a_tensor_of_no_layer_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_foreign(tmp_path, "phi")
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"value_head.weight": torch.ones(2)}, file, {"format": "pt"})
    loaded(tmp_path)
    assert "tensor value_head.weight is of no layer and left out (1 in all)" in caplog.text


def test_a_tied_model_with_another_head_is_refused(tmp_path: Path) -> None:
    """Engines and exports, which go by config.json, would have another policy than the learner."""
    write_foreign(tmp_path, "phi", tie_word_embeddings=True)
    file, name = tmp_path / "model.safetensors", "lm_head.weight"
    embedding = load_file(file)["model.embed_tokens.weight"]
    save_file(load_file(file) | {name: embedding.clone()}, file, {"format": "pt"})
    config = load_foreign_config(tmp_path)
    check_foreign_class(config, tmp_path)
    assert name not in causal_lm.load_foreign(config, tmp_path).state_dict()
    save_file(load_file(file) | {name: embedding + 1}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not the embedding") as late:
        loaded(tmp_path)
    with pytest.raises(CheckpointError) as early:
        check_foreign_class(load_foreign_config(tmp_path), tmp_path)
    assert str(early.value) == str(late.value)
    table = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(table))
    assert torch.equal(loaded(tmp_path).state_dict()[name], embedding + 1)
    check_foreign_class(load_foreign_config(tmp_path), tmp_path)


def test_every_linear_of_a_layer_but_routers_is_quantized() -> None:
    for family in FAMILIES:
        net = foreign_model(foreign_config(family))
        left = {
            name.rpartition(".")[2]
            for name, module in net.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and not is_quantized(f"{name}.weight")
        }
        assert left <= {"lm_head", "shared_expert_gate", "gate"}, family
        others = [
            name
            for name, module in net.named_modules()
            for p, tensor in module.named_parameters(recurse=False)
            if is_quantized(f"{name}.{p}") and not isinstance(module, nn.Linear | Conv1D)
        ]
        assert others == [], family


def test_models_that_are_no_causal_transformers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_foreign_config(tmp_path / "none")
    (tmp_path / "none" / "config.json").write_text('{"model_type": "phi", "hidden_size": "wide"}')
    with pytest.raises(CheckpointError, match=r"config\.json: Validation error"):
        load_foreign_config(tmp_path / "none")
    (tmp_path / "none" / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(CheckpointError, match="t5 is no causal language model"):
        load_foreign_config(tmp_path / "none")
    small: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 48,
    }  # fmt: skip
    foreign_model(BertConfig(**small)).save_pretrained(tmp_path / "bert")
    with pytest.raises(CheckpointError, match="a token sees those behind it"):
        loaded(tmp_path / "bert")
    state: dict[str, Any] = {
        "state_size": 4,
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "vocab_size": VOCAB,
    }
    foreign_model(MambaConfig(**state)).save_pretrained(tmp_path / "mamba")
    with pytest.raises(CheckpointError, match="mamba"):
        loaded(tmp_path / "mamba")
