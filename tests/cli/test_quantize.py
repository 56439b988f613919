"""`areal-q quantize`: what its checkpoints say of themselves; what it refuses, with nothing left behind."""

import json

import msgspec
import pytest
import torch
from helpers.chain_models import CHATML, byte_tokenizer, write_chain
from typer.testing import CliRunner

from areal_q.cli.app import app
from areal_q.cli.quantize import quantize
from areal_q.config import Chat
from areal_q.errors import CheckpointError, ConfigError
from areal_q.models import Decoder, DecoderConfig, init_weights, save_decoder
from areal_q.models.hf.quantized import LEFT_OUT, QUANTIZATION_CONFIGS
from areal_q.models.layer_kinds import DeltaRule, Experts
from areal_q.quant.state_dict import is_quantized
from areal_q.tasks import load_tokenizer

CONFIG = DecoderConfig(
    family="qwen3", vocab_size=24, width=32, layers=1, heads=2, kv_heads=1, head_dim=16, mlp=48,
    max_positions=64,
)  # fmt: skip


def test_weight_beyond_the_format_is_named_and_leaves_nothing(tmp_path):
    model = Decoder(CONFIG)
    init_weights(model, 0)
    name = "model.layers.0.mlp.up_proj.weight"
    with torch.no_grad():
        model.get_parameter(name)[0, 0] = 3e38
    save_decoder(model, tmp_path / "source")
    with pytest.raises(CheckpointError, match=rf"source: {name}: holds .* above 2\^127"):
        quantize(tmp_path / "source", tmp_path / "made", "int8", torch.bfloat16)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("config", [None, {"eos_token_id": 256, "temperature": 0.5}])
def test_a_quantized_model_ends_its_turns_as_the_source_does(tmp_path, config):
    """Other programs read no chat template for an end, and drew on behind <|im_end|>."""
    source, made = tmp_path / "source", tmp_path / "made"
    hf = byte_tokenizer(eos="<|endoftext|>", template=None)
    hf.chat_template = {"default": CHATML, "tool_use": CHATML}
    files = {"generation_config": config} if config else {}
    write_chain(source, "42<|im_end|>", hf, eos=256, **files)
    quantize(source, made, "int8", torch.bfloat16)
    table = json.loads((made / "generation_config.json").read_text())
    assert sorted(table["eos_token_id"]) == [256, 258]
    assert table.get("temperature") == (config or {}).get("temperature")
    template = made / "additional_chat_templates" / "tool_use.jinja"
    assert template.read_text() == CHATML
    assert load_tokenizer(made, Chat()).stops.keys() == load_tokenizer(source, Chat()).stops.keys()


def test_a_model_without_a_tokenizer_is_quantized_with_a_warning(tmp_path):
    save_decoder(Decoder(CONFIG), tmp_path / "source")
    ends = [str(tmp_path / "source"), str(tmp_path / "made")]
    result = CliRunner().invoke(app, ["quantize", *ends, "--format", "int8"])
    assert result.exit_code == 0
    assert "warning: what ends a reply is not named: " in result.stderr
    assert not (tmp_path / "made" / "generation_config.json").exists()


DELTA = DeltaRule(layers=(0,), key_heads=1, value_heads=2, key_dim=16, value_dim=16, kernel=4)
ROUTERS = {"mlp.gate"}
SHARED = ROUTERS | {"mlp.shared_expert_gate"}


@pytest.mark.parametrize(
    ("family", "more", "others"),
    [
        ("qwen3_moe", {}, ROUTERS),
        ("qwen2_moe", {}, SHARED),
        ("qwen3_5_moe_text", {"delta": DELTA}, SHARED),
    ],
)
@pytest.mark.parametrize("format", [f for f, table in QUANTIZATION_CONFIGS.items() if table])
def test_checkpoint_names_every_linear_left_unquantized(tmp_path, format, family, more, others):
    dense = () if family == "qwen3_5_moe_text" else (1,)
    shared = None if family == "qwen3_moe" else 32
    experts = Experts(count=4, per_token=2, mlp=32, dense_layers=dense, shared=shared)
    config = msgspec.structs.replace(
        CONFIG, family=family, layers=3, tied=False, experts=experts, **more
    )
    model = Decoder(config)
    init_weights(model, 0)
    save_decoder(model, tmp_path / "source")
    quantize(tmp_path / "source", tmp_path / "made", format, torch.bfloat16)
    table = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    linears = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    left = {name for name in linears if not is_quantized(f"{name}.weight")}
    sparse = [f"model.layers.{i}" for i in config.sparse_layers]
    wanted = {"lm_head", *(f"{layer}.{name}" for layer in sparse for name in others)}
    if config.delta:
        wanted |= {f"model.layers.0.linear_attn.in_proj_{x}" for x in "ab"}
    assert left == wanted
    assert set(table[LEFT_OUT[table["quant_method"]]]) == left


@pytest.mark.parametrize("format", ["bf16", "int8", "fp8"])
def test_experts_in_one_tensor_are_refused_unwritten(tmp_path, format):
    experts = Experts(count=4, per_token=2, mlp=32)
    more = {"family": "gpt_oss", "tied": False, "experts": experts, "mlp_bias": True}
    save_decoder(Decoder(msgspec.structs.replace(CONFIG, **more)), tmp_path / "source")
    ends = [str(tmp_path / "source"), str(tmp_path / "made")]
    result = CliRunner().invoke(app, ["quantize", *ends, "--format", format])
    assert isinstance(result.exception, ConfigError)
    assert "gpt_oss: its files have matrices joined" in str(result.exception)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("format", ["int4", "int4-fp8"])
def test_groups_that_nothing_loads_are_refused_unwritten(tmp_path, format):
    save_decoder(Decoder(CONFIG), tmp_path / "source")
    ends = [str(tmp_path / "source"), str(tmp_path / "made")]
    result = CliRunner().invoke(app, ["quantize", *ends, "--format", format])
    assert isinstance(result.exception, ConfigError)
    assert f"--format {format}: vLLM takes" in str(result.exception)
    assert "hidden_size is 32" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
