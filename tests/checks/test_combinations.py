"""Which model becomes transformers', and what is refused with it, in the words of check and run."""

import json
import threading
from pathlib import Path

import pytest
import torch
from helpers.kinds import VOCAB, character_tokenizer, config_of, foreign_model, write_foreign
from helpers.policies import build_policy
from transformers import CONFIG_MAPPING, CTRLConfig, OpenAIGPTConfig

from areal_q.checks.automatic import settled
from areal_q.checks.combinations import check_backend
from areal_q.checks.memory import trained_weights
from areal_q.checks.model import check_model
from areal_q.checks.settings import preflight
from areal_q.config import HfEngine, HfModel, PretrainedModel, Run, TorchEngine, load
from areal_q.config.engines import ADDED
from areal_q.errors import ConfigError, UserError
from areal_q.models import load_config, load_frozen
from areal_q.models.shape import shape_of
from areal_q.quant.rescaling import pairs_of
from areal_q.tasks import build_tokenizer
from learner.build import build_learner
from rollout.commands.check import engine_of, model_of


def run_of(path: Path, *settings: str) -> Run:
    given = [f'model = {{ type = "pretrained", path = {json.dumps(str(path))} }}']
    file = path.parent / "run.toml"
    file.write_text("\n".join(given) + "\n")
    usual = ["task.digits=1", "task.heldout=20", "rollout.sampling.max_tokens=4", "learner.uaq=1"]
    return settled(load(file, [*usual, *settings]))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "phi"
    write_foreign(path, "phi")
    return path


def test_a_family_that_is_not_ours_becomes_transformers(path: Path, tmp_path: Path) -> None:
    run = run_of(path, "rollout.engine.slots=77")
    assert run.model == HfModel(path=str(path))
    assert run.rollout.engine == HfEngine(slots=77)
    assert settled(run) == run
    found = {one.name: one for one in (*model_of(run), *engine_of(run))}
    assert "phi by transformers" in found["model"].says
    assert {one.level for one in found.values()} <= {"ok", "warning"}
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    foreign_model(config_of("llama", shape)).save_pretrained(tmp_path / "llama")
    ours = run_of(tmp_path / "llama")
    assert type(ours.model) is PretrainedModel and type(ours.rollout.engine) is TorchEngine
    forced = run_of(tmp_path / "llama", "model.type=hf", f"model.path={tmp_path / 'llama'}")
    assert type(forced.model) is HfModel and type(forced.rollout.engine) is HfEngine


REFUSED = [
    ("learner.uaq=1.5", r"learner\.uaq = 1\.5: not with phi, which transformers computes"),
    (
        'learner.lora.targets=["dense","o_proj"]',
        r"learner\.lora\.targets: o_proj is no linear of phi: it has dense, fc1, fc2, k_proj, q_proj, v_proj",
    ),
    ("learner.backend.type=megatron", r"learner\.backend\.type = 'megatron': not with phi"),
    ("learner.routing_replay=true", r"learner\.routing_replay: not with phi"),
    ("learner.router_aux_coef=0.1", r"learner\.router_aux_coef: not with phi"),
    ("rollout.engine.type=vllm", r"rollout\.engine\.type = 'vllm': not with phi"),
    ("rollout.aqn.sigma_start=0.1", r"rollout\.aqn: not with phi"),
    ("rollout.engine.kv_cache_bytes=9", r"engine\.kv_cache_bytes: not heeded by .*type = 'hf'"),
    ("rollout.engine.prefill_tokens=99", r"engine\.prefill_tokens: not heeded"),
    ("rollout.engine.kv_margin=2", r"engine\.kv_margin: not heeded"),
    ("rollout.engine.fused=false", r"engine\.fused: not heeded"),
    ("rollout.engine.dtype=float32", r"engine\.dtype: not heeded"),
    ("rollout.kv_scales.tokens=9 rollout.engine.kv_cache=fp8", r"rollout\.kv_scales: not with phi"),
]


@pytest.mark.parametrize(("setting", "complaint"), REFUSED)
def test_what_needs_our_decoder_is_refused_by_name(
    path: Path, setting: str, complaint: str
) -> None:
    run = run_of(path, *setting.split())
    with pytest.raises(UserError, match=complaint) as early:
        check_model(run)
    assert len(early.value.lines()) == 1
    with pytest.raises(UserError) as late:
        build_learner(
            run, path.parent, "redis://127.0.0.1:1", "tcp://127.0.0.1:*", "tcp://127.0.0.1:*",
            False, threading.Event(),
        )  # fmt: skip
    assert late.value.lines() == early.value.lines()


STATEFUL = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "eos_token_id": 1},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
}
"""What tiny models that keep a state need beside their sizes; one has Infinity in its config.json."""


@pytest.mark.parametrize("family", STATEFUL)
def test_what_keeps_a_state_is_refused_as_policy_and_teacher(
    path: Path, tmp_path: Path, family: str
) -> None:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = CONFIG_MAPPING[family](**sizes, **heads, **STATEFUL[family])
    foreign_model(config).save_pretrained(tmp_path / family)
    character_tokenizer().save_pretrained(tmp_path / family)
    said = f"{family} keeps a state in place of keys and values"
    with pytest.raises(UserError, match=said):
        check_model(run_of(tmp_path / family))
    with pytest.raises(UserError, match=said):
        load_frozen(tmp_path / family)
    taught = run_of(path, "learner.teacher.type=model", f"learner.teacher.path={tmp_path / family}")
    with pytest.raises(UserError, match=said):
        check_model(taught)


def test_layers_that_cannot_be_computed_again_are_refused(tmp_path: Path) -> None:
    config = OpenAIGPTConfig(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    foreign_model(config).save_pretrained(tmp_path / "gpt")
    character_tokenizer().save_pretrained(tmp_path / "gpt")
    check_model(run_of(tmp_path / "gpt"))
    run = run_of(tmp_path / "gpt", "learner.recompute=true")
    with pytest.raises(UserError, match="recompute: transformers' openai-gpt cannot") as early:
        check_model(run)
    with pytest.raises(UserError) as late:
        load_frozen(tmp_path / "gpt").recompute_layers(True)
    assert str(late.value) == str(early.value)


def test_a_reference_in_other_files_is_the_same_model(path: Path, tmp_path: Path) -> None:
    """Its config.json may say other things that no log-prob depends on, and nothing else."""
    net = write_foreign(tmp_path, "phi")
    net.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="9KB")
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    table = json.loads((tmp_path / "config.json").read_text())
    said = {"use_cache": not table["use_cache"], "bos_token_id": 5, "pad_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(table | said))
    run = run_of(path, f"learner.reference_kl.path={tmp_path}")
    check_model(run)
    (tmp_path / "config.json").write_text(json.dumps(table | {"layer_norm_eps": 0.5}))
    with pytest.raises(UserError, match=r"reference_kl\.path = .*: not shaped like the policy"):
        check_model(run)


def test_adapters_and_muon_need_linears_that_formats_apply_to(tmp_path: Path) -> None:
    config = CTRLConfig(vocab_size=VOCAB, n_embd=32, dff=48, n_layer=2, n_head=4, n_positions=64)
    foreign_model(config).save_pretrained(tmp_path / "ctrl")
    character_tokenizer().save_pretrained(tmp_path / "ctrl")
    with pytest.raises(UserError, match="q_proj is no linear of ctrl: it has none that formats"):
        check_model(run_of(tmp_path / "ctrl", "learner.lora.rank=4"))
    with pytest.raises(UserError, match="'muon': ctrl has no linear that formats apply to"):
        check_model(run_of(tmp_path / "ctrl", "learner.optimizer.type=muon"))
    small = load(None, ['learner.lora.targets=["lm_head"]'])
    with pytest.raises(UserError, match=r"learner\.lora\.targets: lm_head is no linear of qwen3"):
        check_model(small)


@pytest.mark.parametrize("family", ["phi", "gpt_neox"])
def test_adapters_of_a_foreign_model_are_summed_up(tmp_path: Path, family: str) -> None:
    run = run_of(write_foreign(tmp_path, family) and tmp_path, "learner.lora.rank=4")
    shape = check_model(run).shape
    policy = build_policy(run)
    trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    assert trained_weights(run, shape) == trained > 0


def test_an_fp8_cache_is_refused_by_the_engine(path: Path) -> None:
    (found,) = engine_of(run_of(path, "rollout.engine.kv_cache=fp8"))
    assert found.level == "error" and "kv_cache: fp8 is not among auto" in found.says


SHARING = {
    "context = 2 does not divide 3 processes of the learner: learner.processes = 2, or python": (
        2,
        3,
        "",
    ),
    "context = 4 does not divide 1 processes": (4, 1, ""),
    "context = 2: not with a mixture of experts": (2, 0, "model.experts=4"),
}


@pytest.mark.parametrize("complaint", SHARING)
def test_what_cannot_share_tokens_is_refused_by_name(complaint: str) -> None:
    """By the learner, and by check, which does not know the number of its processes."""
    context, ranks, more = SHARING[complaint]
    run = load(None, [f"learner.backend.context={context}", *more.split()])
    tokenizer = build_tokenizer(run.model, run.task)
    with pytest.raises(UserError, match=f"^learner.backend.{complaint}"):
        check_backend(run, shape_of(run.model, tokenizer), ranks)
    (found, *_) = model_of(run)
    assert found.name == "model" and (found.level == "error") == (not ranks)
    assert ranks or complaint in found.says


FP8_SCALES = (
    "rollout.engine.kv_cache=fp8 rollout.engine.kv_on_update=recompute rollout.kv_scales.margin=1.0"
)


def test_transformers_models_share_no_tokens(path: Path) -> None:
    (found, *_) = model_of(run_of(path, "learner.backend.context=2"))
    assert "learner.backend.context = 2: not with phi, which transformers computes" in found.says


@pytest.mark.parametrize(
    ("family", "setting", "complaint"),
    [
        (
            "gemma3_text",
            "learner.uaq=1.5",
            r"learner\.uaq = 1\.5: not with gemma3_text, whose norms",
        ),
        (
            "gemma3_text",
            "rollout.smoothing.alpha=0.5",
            r"smoothing: not with gemma3_text, whose no",
        ),
        (
            "gemma3_text",
            "learner.backend.type=megatron",
            r"'megatron': not with gemma3_text, whose",
        ),
        ("gpt_oss", "rollout.smoothing.alpha=0.5", r"smoothing: not with gpt_oss, whose attention"),
        ("gpt_oss", "learner.backend.type=megatron", r"type = 'megatron': not with gpt_oss, whose"),
        ("gpt_oss", "rollout.engine.type=vllm", r"engine\.type = 'vllm': not with gpt_oss, whose"),
        ("gpt_oss", "rollout.engine.type=sglang", r"type = 'sglang': not with gpt_oss, whose"),
        *(
            (
                "qwen3_5_text",
                setting,
                rf"^{complaint}: not with qwen3_5_text, whose .* keep a state: ",
            )
            for setting, complaint in {
                "learner.uaq=1.5": r"learner\.uaq = 1\.5",
                "rollout.smoothing.alpha=0.5": r"rollout\.smoothing",
                FP8_SCALES: r"rollout\.kv_scales",
                "rollout.engine.type=hf": r"rollout\.engine\.type = 'hf'",
                "rollout.engine.type=vllm": r"rollout\.engine\.type = 'vllm'",
                "rollout.engine.type=sglang": r"rollout\.engine\.type = 'sglang'",
                "learner.backend.type=megatron": r"learner\.backend\.type = 'megatron'",
            }.items()
        ),
        (
            "qwen3_5_text",
            "learner.backend.context=2",
            r"^learner\.backend\.context = 2: not with layers that keep a state",
        ),
        *(
            (
                "qwen3_5_text",
                f"learner.lora={{rank=4,targets=['{target}']}} rollout.format=nf4",
                rf"^learner\.lora\.targets: {target} is no linear of qwen3_5_text: it has down_proj",
            )
            for target in ("in_proj_qkv", "in_proj_z", "out_proj")
        ),
    ],
)
def test_what_would_change_a_family_s_function_is_refused(
    tmp_path: Path, family: str, setting: str, complaint: str
) -> None:
    """Unless it is refused, the function of the model would change without a word, or an engine not start."""
    write_foreign(tmp_path / family, family)
    assert check_model(run_of(tmp_path / family)).shape.sinks == (family == "gpt_oss")
    with pytest.raises(UserError, match=complaint):
        check_model(run_of(tmp_path / family, *setting.split()))


ADAPTED = ["model.experts=4", "learner.lora={}", "rollout.format=bf16"]
FLOAT32 = "rollout.engine.dtype=float32"


@pytest.mark.parametrize("setting", ["rollout.format=int8", "rollout.engine.dtype=auto"])
def test_adapters_of_a_mixture_are_added_in_float32(tmp_path: Path, setting: str) -> None:
    """vLLM has no product for experts beside adapters. Its dense models, and SGLang, are other cases."""
    vllm = "rollout.engine.type=vllm"
    check_model(load(None, [*ADAPTED, vllm, FLOAT32]))
    check_model(load(None, [*ADAPTED[1:], vllm, setting]))
    check_model(load(None, [*ADAPTED, "rollout.engine.type=sglang", FLOAT32]))
    run = load(None, [*ADAPTED, vllm, FLOAT32, setting])
    (found, *_) = model_of(run)
    assert found.level == "error" and ADDED in found.says
    with pytest.raises(UserError) as late:
        build_learner(
            run, tmp_path, "redis://127.0.0.1:1", "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", False,
            threading.Event(),
        )  # fmt: skip
    assert late.value.lines() == [found.says]


def test_what_feeds_gemma_s_further_norms_is_not_known(tmp_path: Path) -> None:
    write_foreign(tmp_path, "gemma3_text")
    with pytest.raises(ValueError, match=r"what feeds .*feedforward_layernorm\.weight is not know"):
        pairs_of(load_config(tmp_path).tensors())


def test_what_several_processes_cannot_do_is_said_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = "learner.processes=2"
    with pytest.raises(ConfigError, match="offload: not with 2 processes of backend torch on cpu"):
        check_model(load(None, [two, "learner.backend.offload=true"]))
    with pytest.raises(ConfigError, match="take GPUs from 0 on"):
        load(None, [two, "learner.device=cuda:1"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="processes = 2: each needs a GPU of its own, and there"):
        preflight(load(None, [two, "learner.device=cuda"]))
