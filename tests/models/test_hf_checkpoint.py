"""Checkpoints, both ways, against transformers: same tensors, same logits."""

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers.kinds import LLAMA3, VARIANTS, config_of
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

import areal_q.models.hf.checkpoint as hf_module
from areal_q.errors import CheckpointError
from areal_q.models import (
    Decoder,
    DecoderConfig,
    PackedLayout,
    init_weights,
    load_config,
    load_decoder,
    save_decoder,
)
from areal_q.models.config import FAMILIES
from areal_q.models.hf.weight_files import check_tensors
from areal_q.tasks import CharTokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LENGTHS = [5, 17, 1, 60]


def hf_config(variant: str, tied: bool) -> PreTrainedConfig:
    head = {} if variant in ("qwen2", "llama") else {"head_dim": 16}
    return config_of(variant, SHAPE, tie_word_embeddings=tied, **head)


def randomised(config: PreTrainedConfig) -> Any:
    """Also the biases and norms, which start at 0 and 1: a swapped one must show."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model)
    return model.eval()


def randomise(model: torch.nn.Module) -> None:
    """A state that fades fast is summed in float32 by transformers, which shows; so none does here."""
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.2)
        if name.endswith("A_log"):
            p.data.sub_(3)


@torch.no_grad()
def assert_same_logits(ours: Decoder, hf: Any) -> None:
    """The packed batch against transformers, one sequence at a time."""
    ids = torch.randint(0, SHAPE["vocab_size"], (sum(LENGTHS),))
    packed = ours.logits(ours(ids, PackedLayout.of(LENGTHS)))
    expected = torch.cat([hf(part[None]).logits[0] for part in ids.split(LENGTHS)])
    assert expected.std() > 0.1
    torch.testing.assert_close(packed, expected, atol=5e-5, rtol=0)


@pytest.fixture
def make() -> Callable[[], Decoder]:
    def build() -> Decoder:
        model = Decoder(DecoderConfig.from_hf(hf_config("qwen3", tied=True).to_dict()))
        init_weights(model, 0)
        return model

    return build


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_those_of_the_model(family: str, tied: bool) -> None:
    """In the model's order; of 4 layers the second has experts, and the last is told to have none. gpt-oss' and
    those of Qwen3.5's mixtures all have them."""
    table = SHAPE | {"model_type": family, "num_hidden_layers": 4, "tie_word_embeddings": tied}
    table |= {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = DecoderConfig.from_hf(table | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    every = family in ("gpt_oss", "qwen3_5_moe_text")
    some = family in ("qwen2_moe", "qwen3_moe", "qwen3_next")
    assert config.sparse_layers == ((0, 1, 2, 3) if every else (1,) if some else ())
    state = Decoder(config).state_dict()
    assert [*config.tensors().items()] == [(name, tuple(t.shape)) for name, t in state.items()]
    assert config.weights == sum(t.numel() for t in state.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_that_lacks_a_number_is_read_or_refused(family: str) -> None:
    """In a line, whatever it lacks: a mixture whose MLPs had no width was a KeyError."""
    table = SHAPE | {"model_type": family}
    table |= {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    for lacking in itertools.chain.from_iterable(itertools.combinations(table, n) for n in (1, 2)):
        if "model_type" not in lacking:
            with suppress(CheckpointError):
                DecoderConfig.from_hf({k: v for k, v in table.items() if k not in lacking})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_config_names_its_activation(family: str) -> None:
    """A version's digest covers the file, so that a key that goes missing parts a run from its own log."""
    table = SHAPE | {"model_type": family}
    table |= {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    written = DecoderConfig.from_hf(table).to_hf()
    assert {"hidden_act", "hidden_activation"} & written.keys()


def test_a_mixture_with_windows_is_read_as_it_is_written() -> None:
    table = SHAPE | {"model_type": "qwen3_moe", "use_sliding_window": True, "sliding_window": 4}
    table |= {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = DecoderConfig.from_hf(table)
    assert (config.window, config.sliding) == (4, (0, 1))
    assert DecoderConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_is_transformers_default(family: str, tmp_path: Path) -> None:
    """A head that is the embedding, and RoPE; in gpt-oss, windows and a norm's eps too."""
    theirs = CONFIG_MAPPING[family]()
    table = SHAPE | {"model_type": family, "num_experts": 3, "num_experts_per_tok": 2}
    config = DecoderConfig.from_hf(table | {"moe_intermediate_size": 24})
    assert config.tied == theirs.tie_word_embeddings
    ropes = theirs.rope_parameters
    assert config.rope_theta == ropes.get("full_attention", ropes)["rope_theta"]
    if family == "gpt_oss":
        assert ropes.items() >= (config.rope_scaling or {"none": 0}).items()
        assert (config.window, config.sliding) == (theirs.sliding_window, (0,))
        assert config.norm_eps == theirs.rms_norm_eps
    if "sliding_attention" in ropes:
        assert config.window_theta == ropes["sliding_attention"]["rope_theta"]
        assert (config.window, config.query_scalar) == (4096, theirs.query_pre_attn_scalar)
        longer = DecoderConfig.from_hf(table | {"num_hidden_layers": 12})
        assert longer.sliding == tuple(i for i in range(12) if i not in (5, 11))


every_kind = pytest.mark.parametrize("family", VARIANTS)
tied_or_not = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 3e5},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 3e5}},
        {"rope_scaling": LLAMA3 | {"rope_theta": 3e5}, "rope_theta": 1e6},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}, "rope_theta": 1e6},
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3},
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16},
        {"rope_scaling": {"type": "yarn", "factor": 2.0}, "original_max_position_embeddings": 16},
    ],
)
def test_rope_is_what_transformers_reads_from_either_table(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    randomised(hf_config("qwen3", tied=False)).save_pretrained(tmp_path)
    edit_config(tmp_path, rope_parameters=None)
    edit_config(tmp_path, **change)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_logits(load_decoder(tmp_path), hf.eval())


def test_file_beside_a_stale_index_is_read_as_transformers_does(tmp_path: Path) -> None:
    randomised(hf_config("llama", tied=False)).save_pretrained(tmp_path)
    stale = {k: v + 0.5 for k, v in load_file(tmp_path / "model.safetensors").items()}
    save_file(stale, tmp_path / "stale.safetensors")
    index = {"weight_map": dict.fromkeys(stale, "stale.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_logits(load_decoder(tmp_path), hf.eval())


@every_kind
@tied_or_not
def test_a_transformers_checkpoint_gives_the_same_logits(
    family: str, tied: bool, tmp_path: Path
) -> None:
    hf = randomised(hf_config(family, tied))
    hf.save_pretrained(tmp_path)
    assert_same_logits(load_decoder(tmp_path), hf)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "swish"},
        {"use_sliding_window": False, "sliding_window": 4},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    ],
)
def test_config_in_other_words_gives_transformers_logits(
    tmp_path: Path, family: str, change: dict[str, Any]
) -> None:
    theirs = randomised(hf_config(family, tied=True))
    theirs.save_pretrained(tmp_path)
    table = json.loads((tmp_path / "config.json").read_text()) | change
    table.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(table))
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert_same_logits(load_decoder(tmp_path), oracle)


@every_kind
@tied_or_not
def test_transformers_reads_our_checkpoint_with_the_same_logits(
    family: str, tied: bool, tmp_path: Path
) -> None:
    config = DecoderConfig.from_hf(hf_config(family, tied).to_dict())
    model = Decoder(config)
    randomise(model)
    save_decoder(model, tmp_path / "out")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    hf, info = loaded
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_same_logits(model, hf.eval())
    assert load_config(tmp_path / "out") == config


@pytest.mark.parametrize("again", [False, True], ids=["as published", "saved by its text part"])
def test_the_language_model_of_one_that_sees_images_is_read(again: bool, tmp_path: Path) -> None:
    """transformers writes a text part with the names that it has in the whole."""
    text = hf_config("qwen3_5_text", tied=False).to_dict()
    sees = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }  # fmt: skip
    whole = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=sees))
    randomise(whole)
    whole.save_pretrained(tmp_path)
    part = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    if again:
        part.save_pretrained(tmp_path)
    else:
        edit(tmp_path, lambda t: t | {"mtp.fc.weight": torch.ones(2)})
    check_tensors(tmp_path, load_config(tmp_path))
    assert_same_logits(load_decoder(tmp_path), part)
    edit_config(
        tmp_path, quantization_config={"quant_method": "fp8"}
    )  # as the FP8 ones have it, at the top
    assert_refused(tmp_path, "quantization_config")


def test_a_share_of_a_head_is_turned_whoever_names_its_size() -> None:
    named = hf_config("qwen3_5_text", tied=False).to_dict()
    unnamed = named | {
        "head_dim": None,
        "hidden_size": named["head_dim"] * named["num_attention_heads"],
    }
    share = named["rope_parameters"]["partial_rotary_factor"]
    assert DecoderConfig.from_hf(unnamed).rope_dim == share * named["head_dim"]


def test_a_checkpoint_round_trips_bit_for_bit(tmp_path: Path, make: Callable[[], Decoder]) -> None:
    model = make()
    save_decoder(model, tmp_path / "out")
    again = load_decoder(tmp_path / "out")
    assert again.config == model.config
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
    )
    assert all(p.requires_grad for p in again.parameters())


def test_a_sharded_bfloat16_checkpoint_loads_in_float32(tmp_path: Path) -> None:
    bf16 = randomised(hf_config("qwen2", tied=True)).bfloat16()
    bf16.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_logits(load_decoder(tmp_path), hf.eval())


def test_a_tied_checkpoint_may_hold_its_head_as_well(
    tmp_path: Path, make: Callable[[], Decoder]
) -> None:
    save_decoder(make(), tmp_path / "out")
    edit(tmp_path / "out", lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    assert "lm_head.weight" not in load_decoder(tmp_path / "out").state_dict()


def test_a_tied_checkpoint_with_another_head_is_refused(saved: Path) -> None:
    edit(saved, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] + 1})
    assert_refused(saved, "lm_head.weight is not the embedding")
    # Another dtype says nothing by its bytes.
    edit(saved, lambda t: t | {"lm_head.weight": t["lm_head.weight"].bfloat16()})
    assert_refused(saved, "lm_head.weight is not the embedding", read=True)


def test_frequencies_of_an_older_transformers_are_passed_over(saved: Path) -> None:
    left = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    edit(saved, lambda t: t | left)
    assert not left.keys() & load_decoder(saved).state_dict().keys()


def test_the_tokenizer_is_saved_beside_the_model(
    tmp_path: Path, make: Callable[[], Decoder]
) -> None:
    save_decoder(make(), tmp_path / "out", CharTokenizer())
    hf = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert hf("1+1=")["input_ids"] == CharTokenizer().encode("1+1=")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == 40


def test_saving_replaces_a_checkpoint_whole_and_leaves_no_rest(
    tmp_path: Path, make: Callable[[], Decoder]
) -> None:
    for seed in (1, 2):
        model = make()
        init_weights(model, seed)
        save_decoder(model, tmp_path / "out", CharTokenizer() if seed == 1 else None)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert torch.equal(
        load_decoder(tmp_path / "out").model.embed_tokens.weight, model.model.embed_tokens.weight
    )


def test_a_failed_save_leaves_the_old_checkpoint(
    tmp_path: Path, make: Callable[[], Decoder]
) -> None:
    save_decoder(make(), tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    other = make()
    init_weights(other, 5)
    with pytest.raises(ZeroDivisionError):
        save_decoder(other, tmp_path / "out", FailingTokenizer())
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_save_killed_at_any_moment_loses_no_checkpoint(
    tmp_path: Path, make: Callable[[], Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file-system step of a replacement is the last one once; clean-up code does not run."""
    old, new = make(), make()
    init_weights(new, 1)
    for steps in range(20):
        root = tmp_path / str(steps)
        save_decoder(old, root / "out")
        finished = killed_after(
            steps, monkeypatch, lambda root=root: save_decoder(new, root / "out")
        )
        # Whatever the kill left, a save that fails at once must find a whole checkpoint to keep.
        with pytest.raises(ZeroDivisionError):
            save_decoder(make(), root / "out", FailingTokenizer())
        kept = load_decoder(root / "out").model.embed_tokens.weight
        choices = [new] if finished else [old, new]
        assert any(torch.equal(kept, m.model.embed_tokens.weight) for m in choices)
        assert [p.name for p in root.iterdir()] == ["out"]
        if finished:
            return
    raise AssertionError("the save never finished")


class Killed(BaseException):
    """Stands for SIGKILL."""


class FailingTokenizer(CharTokenizer):
    def save(self, directory: str) -> None:
        raise ZeroDivisionError


def killed_after(steps: int, monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> bool:
    """Runs `action`, which stops for good after `steps` renames, writes or removals; True if it ended."""
    left = steps

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("mkdir", "rename", "replace", "write_text"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        patch.setattr(hf_module, "save_tensors", counted(hf_module.save_tensors))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        try:
            action()
        except Killed:
            return False
    return True


# What cannot be loaded is named


@pytest.fixture
def saved(tmp_path: Path, make: Callable[[], Decoder]) -> Path:
    save_decoder(make(), tmp_path / "model")
    return tmp_path / "model"


Tensors = dict[str, torch.Tensor]


def edit(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file)


def edit_config(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    table = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in table.items() if v is not None}))


def assert_refused(directory: Path, complaint: str, read: bool = False) -> None:
    """What no tensor need be read for is refused in the same words without reading one; `read` is True for the
    rest."""
    with pytest.raises(CheckpointError, match=complaint) as caught:
        load_decoder(directory)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)
    if read:
        check_tensors(directory, load_config(directory))
        return
    with pytest.raises(CheckpointError) as early:
        check_tensors(directory, load_config(directory))
    assert str(early.value) == str(caught.value)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "nowhere: no such directory$")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    assert_refused(saved, f"{name}: [Nn]o such file")


def test_weights_of_another_kind_come_with_the_way_out(saved: Path) -> None:
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    assert_refused(saved, r"model\.safetensors: no such file; only safetensors are read")


def test_an_adapter_is_no_model(saved: Path) -> None:
    (saved / "config.json").rename(saved / "adapter_config.json")
    assert_refused(saved, r"an adapter alone is no model: merge it into its base")


def test_weights_of_another_user_are_told_from_missing_ones(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers writes mode 0600, and safetensors calls what it may not open a file that is not there."""
    if os.getuid() == 0:  # may read everything
        monkeypatch.setattr("areal_q.models.hf.weight_files.safe_open", not_there)
        monkeypatch.setattr("areal_q.models.hf.weight_files.os.access", lambda path, mode: False)
    (saved / "model.safetensors").chmod(0)
    assert_refused(
        saved, r"model.safetensors: user \d+ may not read it by its mode.* chmod -R a\+rX"
    )


def not_there(file: Path, framework: str) -> None:
    raise FileNotFoundError(f"No such file or directory: {file}")


def test_a_missing_tensor_is_named(saved: Path) -> None:
    edit(saved, lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"})
    assert_refused(saved, r"tensor model\.norm\.weight is missing \(1 in all\)")


def test_an_unexpected_tensor_is_named(saved: Path) -> None:
    edit(saved, lambda t: t | {"model.extra": torch.ones(1)})
    assert_refused(saved, r"model\.safetensors: unexpected tensor model\.extra")


def test_a_misshapen_tensor_is_named(saved: Path) -> None:
    edit(saved, lambda t: t | {"model.norm.weight": torch.ones(7)})
    assert_refused(saved, r"model\.norm\.weight is \[7\], config\.json says \[32\]")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_tensor_that_is_not_finite_is_named(saved: Path, name: str, value: float) -> None:
    edit(saved, lambda t: t | {name: t[name].index_fill(0, torch.tensor([3]), value)})
    assert_refused(saved, rf"model\.safetensors: {name} holds NaN or an infinity", read=True)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(saved: Path, keep: int) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert_refused(saved, r"model\.safetensors: ")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is none of qwen2, qwen3, qwen3_moe, llama, mistral"),
        ({"model_type": ["gpt2"]}, r"model_type = \['gpt2'\]: must be text"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "wide"}, "hidden_size = 'wide': must be a whole number, not text"),
        ({"hidden_act": "gelu"}, "'gelu' is not implemented"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window = 0"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types linear_attention is not impl"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types sliding_attention"),
        ({"is_causal": False}, "is_causal false is not implemented"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (
            {"num_attention_heads": 0, "head_dim": None},
            "num_attention_heads = 0: must be a whole number, at least 1",
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not implemented"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -1}}, "'yarn' with factor = -1"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' with factor = None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not implemented"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "fewer than 2 layers"),
        ({"rope_scaling": {"full_attention": {"rope_type": "yarn"}}}, "RoPE of a kind of layer"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "'llama3' with factor = None"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": "4"}}, "high_freq_factor = '4'"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "not below high_freq_factor"),
        ({"rope_theta": -1}, "rope_theta = -1"),
        ({"rope_scaling": LLAMA3 | {"factor": math.inf}}, "factor = inf"),
        ({"hidden_size": -64}, "hidden_size = -64: must be a whole number, at least 1"),
        ({"vocab_size": 2**40}, "vocab_size = 1099511627776: must be a whole number, at most"),
        (
            {"num_hidden_layers": 10**6},
            "num_hidden_layers = 1000000: must be a whole number, at most 1000",
        ),
        ({"head_dim": 0}, "head_dim = 0: must be a whole number, at least 1"),
        ({"head_dim": 7}, "a head has 7"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0: must be"),
        ({"num_key_value_heads": 3}, "4 heads do not share 3"),
        ({"max_position_embeddings": -1}, "max_position_embeddings = -1: must be"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps = nan: must be"),
        ({"eos_token_id": -5}, "eos_token_id = -5: must be"),
    ],
)
def test_a_config_that_cannot_be_run_is_named(
    saved: Path, change: dict[str, object], complaint: str
) -> None:
    edit_config(saved, **change)
    assert_refused(saved, rf"config\.json: .*{complaint}")


def test_layers_without_tensors_are_told_before_any_is_built(saved: Path) -> None:
    edit_config(saved, num_hidden_layers=999)
    assert_refused(saved, r"config\.json says 999 layers, and there are \d+ tensors")


@pytest.mark.parametrize("eos", [(), (2,), (2, 3)])
def test_end_tokens_come_back_and_none_is_no_list(
    make: Callable[[], Decoder], tmp_path: Path, eos: tuple[int, ...]
) -> None:
    """Of an empty list transformers' `generate` takes the first."""
    model = make()
    model.config = msgspec.structs.replace(model.config, eos_ids=eos)
    save_decoder(model, tmp_path / "saved")
    assert load_config(tmp_path / "saved").eos_ids == eos
    hf: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert hf.generate(torch.tensor([[5, 6]]), max_new_tokens=1).shape[1] == 3


@pytest.mark.parametrize("text", ["", "{", "[1]", "\0", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_named(saved: Path, text: str) -> None:
    (saved / "config.json").write_text(text)
    assert_refused(saved, r"config\.json: not (JSON|a JSON object)")


@pytest.mark.parametrize("shards", [{"model.norm.weight": "../x.safetensors"}, ["a"], {"a": 1}])
def test_index_that_names_no_files_of_its_directory_is_refused(saved: Path, shards: object) -> None:
    (saved / "model.safetensors").unlink()
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert_refused(saved, r"model\.safetensors\.index\.json: ")
