"""Codes and scales against the libraries that define the layouts: torchao, compressed-tensors, bitsandbytes.

They come with `make test-formats`, in an environment of their own; without them this file is skipped.
"""
# pyright: reportMissingImports=false

import warnings
from typing import Any

import pytest
import torch

from areal_q.cli.quantize import quantize as write_quantized
from areal_q.models import Decoder, DecoderConfig, init_weights, save_decoder
from areal_q.quant import FORMATS, quantize_state
from areal_q.quant.formats.e2m1 import decode, unpack
from areal_q.quant.state_dict import parts_of

MISSING = "torchao, compressed-tensors or bitsandbytes is not installed: make test-formats"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torchao = pytest.importorskip("torchao", reason=MISSING, exc_type=ImportError)
    pytest.importorskip("compressed_tensors", reason=MISSING, exc_type=ImportError)
    bitsandbytes = pytest.importorskip("bitsandbytes", reason=MISSING, exc_type=ImportError)
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.compressors.pack_quantized.helpers import (
        pack_to_int32,
        unpack_from_int32,
    )
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_mx
    from torchao.quantization.quant_primitives import _choose_scale_float8, _quantize_affine_float8
    from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(params=["normal", "heavy tails", "tiny", "large", "some zeros"])
def weight(request) -> torch.Tensor:
    torch.manual_seed(0)
    w = torch.randn(256, 384)
    match request.param:
        case "heavy tails":
            return w**5
        case "tiny":
            return w * 1e-6
        case "large":
            return w * 1e6
        case "some zeros":
            w[3:70, 128:256] = 0
    return w


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def arguments(**changed) -> QuantizationArgs:
    fields = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    return QuantizationArgs(**{**fields, "symmetric": True, "dynamic": False, **changed})


def minmax(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = weight.unflatten(1, (-1, size))
    return blocks.amin(2), blocks.amax(2)


INT4 = [("int4", 128), ("int4-g32", 32)]


@pytest.mark.parametrize(("name", "group"), INT4)
def test_int4_is_what_compressed_tensors_packs(weight, name, group):
    args = arguments(group_size=group)
    scale = calculate_qparams(*minmax(weight, group), args)[0].bfloat16()
    parts = FORMATS[name].quantize(weight, "w")
    alive = (weight.unflatten(1, (-1, group)) != 0).any(2)
    assert torch.equal(parts["weight_scale"][alive], scale[alive])
    codes = quantize(
        weight, parts["weight_scale"].float(), torch.zeros(scale.shape), args, dtype=torch.int8
    )
    assert same(parts["weight_packed"], pack_to_int32(codes, 4))
    assert parts["weight_shape"].tolist() == [256, 384]
    assert torch.equal(
        FORMATS[name].dequantize(parts),
        dequantize(codes, parts["weight_scale"].float(), args=args),
    )


@pytest.mark.parametrize(("name", "group"), INT4)
@pytest.mark.parametrize("width", [1, 7, 8, 9, 130])
def test_rows_that_end_in_a_word_pack_as_compressed_tensors_does(width, name, group):
    weight = torch.randn(5, width)
    parts = FORMATS[name].quantize(weight, "w")
    shape = torch.Size(parts["weight_shape"].tolist())
    codes = unpack_from_int32(parts["weight_packed"], 4, shape)
    assert same(parts["weight_packed"], pack_to_int32(codes, 4))
    real = codes.float() * parts["weight_scale"].float().repeat_interleave(group, 1)[:, :width]
    assert torch.equal(real, FORMATS[name].dequantize(parts))


@pytest.mark.parametrize("width", [1, 3, 4, 9, 384])
def test_int8_weight_is_what_compressed_tensors_packs(weight, width):
    weight = weight[:, :width]
    parts = FORMATS["int8-weight"].quantize(weight, "w")
    scale = parts["weight_scale"].float()
    args = arguments(num_bits=8, strategy="channel", group_size=None)
    codes = quantize(weight, scale, None, args, dtype=torch.int8)
    assert same(parts["weight_packed"], pack_to_int32(codes, 8))
    assert parts["weight_shape"].tolist() == [256, width]
    assert torch.equal(
        FORMATS["int8-weight"].dequantize(parts), dequantize(codes, scale, args=args)
    )
    exact = weight.abs().amax(1, keepdim=True) / 127
    alive = exact[:, 0] > 0
    assert torch.equal(parts["weight_scale"][alive], exact.bfloat16()[alive])


def test_nvfp4_is_what_compressed_tensors_packs(weight):
    args = arguments(
        type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
    )
    low, high = minmax(weight, 16)
    divisor = generate_gparam(low.amin(), high.amax())
    scale, _ = calculate_qparams(low, high, args, divisor)
    values = quantize(weight, scale, None, args, dtype=torch.float32, global_scale=divisor)
    parts = FORMATS["nvfp4"].quantize(weight, "w")
    assert same(parts["weight_global_scale"], divisor)
    assert same(parts["weight_scale"], scale.to(torch.float8_e4m3fn))
    assert same(parts["weight_packed"], pack_fp4_to_uint8(values))
    real = dequantize(values, scale.float(), args=args, global_scale=divisor)
    assert torch.equal(FORMATS["nvfp4"].dequantize(parts), real)


def test_mxfp4_is_torchao_s_mx_tensor_in_its_standard_mode(weight):
    scale, packed = to_mx(weight, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.FLOOR)
    parts = FORMATS["mxfp4"].quantize(weight, "w")
    assert same(parts["weight_scale"], scale.view(torch.uint8))
    assert same(parts["weight_packed"], packed.view(torch.uint8).view(256, 192))
    mx = MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32)
    assert torch.equal(FORMATS["mxfp4"].dequantize(parts), mx.dequantize(torch.float32))


def test_nf4_is_what_bitsandbytes_stores(weight):
    packed, state = bitsandbytes.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    parts = FORMATS["nf4"].quantize(weight, "w")
    alive = (weight.view(-1, 64) != 0).any(1)
    assert torch.equal(parts["weight.absmax"][alive], state.absmax[alive])
    assert same(parts["weight"], packed)
    assert torch.equal(parts["weight.quant_map"], state.code)
    stored = {suffix.removeprefix("weight."): tensor for suffix, tensor in parts.items()}
    packed = stored.pop("weight")
    ours = bitsandbytes.functional.QuantState.from_dict(stored, device="cpu")
    assert ours.shape == weight.shape and ours.dtype == torch.bfloat16
    real = bitsandbytes.functional.dequantize_4bit(packed, ours)
    assert torch.equal(FORMATS["nf4"].dequantize(parts).bfloat16(), real)


@pytest.mark.parametrize(
    ("name", "suffix", "block"),
    [("fp8", "weight_scale_inv", [128, 128]), ("fp8-channel", "weight_scale", [1, 384])],
)
def test_fp8_is_what_torchao_casts(weight, name, suffix, block):
    scale = _choose_scale_float8(weight, block, torch.float8_e4m3fn)
    parts = FORMATS[name].quantize(weight, "w")
    alive = weight.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1])).abs().amax((1, 3)) > 0
    assert torch.equal(parts[suffix][alive], scale[alive])
    codes = _quantize_affine_float8(weight, parts[suffix], torch.float8_e4m3fn)
    assert same(parts["weight"], codes)


def test_fp8_and_int8_are_what_compressed_tensors_stores(weight):
    block = arguments(
        num_bits=8, type="float", strategy="block", block_structure=[128, 128], group_size=None
    )
    parts = FORMATS["fp8"].quantize(weight, "w")
    codes = quantize(weight, parts["weight_scale_inv"], None, block, dtype=torch.float8_e4m3fn)
    assert same(parts["weight"], codes)
    for name, kind, dtype in (
        ("fp8-channel", "float", torch.float8_e4m3fn),
        ("fp8-weight", "float", torch.float8_e4m3fn),
        ("int8", "int", torch.int8),
    ):
        channel = arguments(num_bits=8, type=kind, strategy="channel", group_size=None)
        parts = FORMATS[name].quantize(weight, "w")
        scale = parts["weight_scale"].float()
        codes = quantize(weight, scale, None, channel, dtype=dtype)
        assert same(parts["weight"], codes)
        assert torch.equal(FORMATS[name].dequantize(parts), dequantize(codes, scale, args=channel))


def test_every_e2m1_code_is_torchaos():
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32

    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(decode(codes), f4_unpacked_to_f32(codes))
    assert unpack(torch.tensor([[0x21]], dtype=torch.uint8)).tolist() == [[1, 2]]


@pytest.mark.parametrize(
    "format", ["int4", "int4-g32", "int8-weight", "fp8-weight", "fp8", "nvfp4", "mxfp4", "nf4"]
)
def test_transformers_loads_what_areal_q_quantize_writes(tmp_path, format):
    config = DecoderConfig(
        family="qwen2", vocab_size=97, width=256, layers=2, heads=4, kv_heads=2, head_dim=64, mlp=512,
        max_positions=256, qkv_bias=True,
    )  # fmt: skip
    model = Decoder(config)
    init_weights(model, 0)
    save_decoder(model, tmp_path / "source")
    write_quantized(tmp_path / "source", tmp_path / "made", format, torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.bfloat16)
    assert theirs(torch.arange(1, 30)[None]).logits.isfinite().all()
    state = {name: weight.detach() for name, weight in model.state_dict().items()}
    published = quantize_state(state, format)
    for layer in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        ours = FORMATS[format].dequantize(parts_of(published, layer, format))
        weight: Any = theirs.get_submodule(layer).weight
        if format == "nf4":
            weight = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        assert torch.equal(weight.bfloat16(), ours.bfloat16()), layer
