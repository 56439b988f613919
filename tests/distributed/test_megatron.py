"""Megatron-core on real gloo processes: the losses, log-probs, weights and moments of the torch backend.

`make test-megatron`; elsewhere all of it that needs Megatron is skipped.
"""

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from helpers.policies import build_policy, save_at

from areal_q.checks.combinations import check_backend
from areal_q.config import Run
from areal_q.errors import ConfigError
from areal_q.kernels.cpu_tile import has
from areal_q.messages import Array
from areal_q.models import Decoder, DecoderConfig, Experts, init_weights, load_decoder, save_decoder
from learner import checkpoint
from learner.backends.megatron import require
from learner.backends.megatron.tensor_names import TensorEntry, entries, padded
from learner.backends.single_device import TorchPolicy
from learner.data.packing import Sample
from learner.policy_update import update_policy
from learner.publishing.version_builder import VersionBuilder

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron is not installed: make test-megatron",
)
pytestmark = pytest.mark.timeout(60)
SHAPE = DecoderConfig(
    family="qwen3", vocab_size=257, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48,
    max_positions=64, norm_eps=1e-6,
)  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def shaped(**fields) -> DecoderConfig:
    from msgspec.structs import replace

    return replace(SHAPE, **fields)


SHAPES = {
    "qwen3": SHAPE,
    "qwen2": shaped(family="qwen2", qkv_bias=True, tied=False),
    "llama": shaped(family="llama", tied=False, rope_scaling=LLAMA3),
    "moe": shaped(
        family="qwen3_moe", experts=Experts(count=4, per_token=2, mlp=24, dense_layers=(0,))
    ),
    "sparse": shaped(
        family="qwen3_moe", experts=Experts(count=4, per_token=2, mlp=24, normalised=False)
    ),
    "qwen2_moe": shaped(
        family="qwen2_moe",
        qkv_bias=True,
        tied=False,
        experts=Experts(count=4, per_token=2, mlp=24, shared=40, dense_layers=(0,)),
    ),
    # Blocks of 128 end in the middle of what a rank holds.
    "wide": shaped(family="qwen2", qkv_bias=True, tied=False, head_dim=40, mlp=192),
}
SETTINGS = [
    # A large eps makes AdamW's step smooth in the gradient; at 1e-8 rounding alone could turn its sign.
    "learner.optimizer={eps=1e-3, lr=1e-2, weight_decay=0.1}",
    "learner.microbatch_tokens=24",
]
REFERENCE = "learner.reference_kl={coef=0.1}"
SHARE_TOKENS = ["learner.backend.context=2", "learner.microbatch_tokens=12"]
CRITIC = ["learner.advantage.type=gae", "learner.critic={optimizer={eps=1e-3, lr=1e-2}}"]
SHARED = "learner.critic.trunk=shared"
SHARES = "checkpoint.sharded=true"
DTYPES = ("float32", "bfloat16")
JOBS = {
    "tensor": ("qwen2", ["learner.backend.tensor=2", *CRITIC, SHARES]),
    "tensor, all terms": (
        "qwen3",
        [
            "learner.backend.tensor=2",
            "learner.recompute=true",
            "learner.entropy_coef=0.01",
            "learner.reference_kl={coef=0.1, reset_every=1}",
            *CRITIC,
        ],
    ),
    "pipeline": ("qwen3", ["learner.backend.pipeline=2", REFERENCE, *CRITIC, SHARES]),
    "context": ("qwen3", [*SHARE_TOKENS, "learner.recompute=true", REFERENCE, *CRITIC, SHARES]),
    "pipeline, one trunk": ("qwen2", ["learner.backend.pipeline=2", *CRITIC, SHARED]),
    "data": ("llama", ["learner.epochs=2", REFERENCE, *CRITIC, SHARED]),
    "data, two trunks": ("llama", [*CRITIC, SHARES]),
}


def model_of(shape: DecoderConfig, seed: int = 0) -> Decoder:
    """With norms and biases that are not 1 and 0."""
    model = Decoder(shape)
    init_weights(model, seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.1)
    return model


@pytest.fixture
def run_of(make_run, byte_tokenizer: Path, tmp_path: Path) -> Callable[..., Run]:
    """run_of("qwen2", "learner.epochs=2") learns a model in Hugging Face layout, on Megatron."""

    def make(shape: str, *settings: str) -> Run:
        path = tmp_path / f"hf-{shape}"
        if not path.exists():
            save_decoder(model_of(SHAPES[shape]), path)
            for file in byte_tokenizer.iterdir():
                shutil.copy(file, path)
        model = f"model={{type='pretrained', path='{path}'}}"
        return make_run(model, "learner.backend.type=megatron", *SETTINGS, *settings)

    return make


def rewarded(samples: list[Sample], seed: int) -> list[Sample]:
    """With rewards that differ."""
    rewards = torch.rand(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    return [
        replace(s, trajectory=msgspec.structs.replace(s.trajectory, reward=reward))
        for s, reward in zip(samples, rewards, strict=True)
    ]


def alone(run: Run) -> TorchPolicy:
    """The torch backend, in this process."""
    return build_policy(run, 0.7)


def start(directory: Path, policy: TorchPolicy) -> None:
    """Leaves a checkpoint of `policy` to go on from."""
    save_at(1, directory / "checkpoints", policy, keep=5)


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    path = directory / "checkpoints" / "step-000009"
    return checkpoint.read_tensors(path, checkpoint.read_state(path))


def check(
    run: Run,
    policy: TorchPolicy,
    steps: list[list[Sample]],
    found,
    directory: Path,
    tolerance: float = 1e-5,
) -> None:
    """`policy` takes the same steps: metrics, weights, moments and counts are the same."""
    for values, samples in zip(found, steps, strict=True):
        if run.learner.reference_kl and run.learner.reference_kl.reset_every:
            policy.reset_reference()
        expected = update_policy(policy, samples)
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            assert values[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    tensors, expected = tensors_in(directory), checkpoint.tensors_of(policy)
    assert tensors.keys() == expected.keys()
    for name in expected.keys() - {"rng"}:
        torch.testing.assert_close(
            tensors[name].float(),  # codes may be FP8
            expected[name].float(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@needs_megatron
@pytest.mark.timeout(900)
def test_two_ranks_of_every_kind_learn_what_torch_does(
    run_of: Callable[..., Run], make_samples, on_ranks, tmp_path: Path
):
    """And what torch has of theirs, it exports to what transformers computes."""
    steps = [rewarded(make_samples(15, seed), seed) for seed in range(3)]
    # The first group has no advantage, so that both kinds of micro-batches occur.
    steps = [[replace(s, advantage=0.0) if s.ticket == 0 else s for s in step] for step in steps]
    jobs, policies = {}, {}
    for name, (shape, settings) in JOBS.items():
        run = run_of(shape, *settings)
        policies[name] = alone(run)
        update_policy(policies[name], steps[0])
        start(tmp_path / name, policies[name])
        jobs[tmp_path / name] = run, steps[1:]
    # A learning rate too small to move a float32: weights went to the ranks and back.
    still = run_of("qwen2", "learner.backend.tensor=2", "learner.optimizer={lr=1e-30}")
    jobs[tmp_path / "still"] = still, steps[1:2]
    found = on_ranks(2, jobs)
    for (name, policy), (values, _) in zip(policies.items(), found, strict=False):
        run = jobs[tmp_path / name][0]
        check(run, policy, steps[1:], values, tmp_path / name)
        written = (tmp_path / name / "checkpoints" / "step-000009").glob("tensors-*")
        assert len(list(written)) == run.checkpoint.sharded
    # One rank goes on from what two have written, each its share.
    more, again, policy = [steps[0]], tmp_path / "again", policies["pipeline"]
    shutil.copytree(tmp_path / "pipeline", again)
    run = run_of("qwen3", REFERENCE, *CRITIC)
    ((values, _),) = on_ranks(1, {again: (run, more)})
    check(run, policy, more, values, again)
    before, after = alone(still).model.state_dict(), tensors_in(tmp_path / "still")
    assert all(torch.equal(after[f"model.{name}"], p) for name, p in before.items())
    same_as_transformers(tensors_in(tmp_path / "tensor"), tmp_path)


def same_as_transformers(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = Decoder(SHAPES["qwen2"])
    model.load_state_dict(
        {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    )
    save_decoder(model, tmp_path / "export")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    ids = torch.randint(0, 257, (11,), generator=torch.Generator().manual_seed(0))
    from areal_q.models import PackedLayout

    with torch.no_grad():
        ours = load_decoder(tmp_path / "export")
        logits = ours.logits(ours(ids, PackedLayout.of([11])))
        torch.testing.assert_close(logits, theirs(ids[None]).logits[0], rtol=1e-4, atol=1e-4)


@needs_megatron
@pytest.mark.timeout(900)
def test_one_rank_learns_what_torch_does_also_in_bfloat16(
    run_of: Callable[..., Run], make_samples, on_ranks, tmp_path: Path
):
    steps = [rewarded(make_samples(15, seed), seed) for seed in range(2)]
    exact, coarse = (run_of("qwen3", *CRITIC, f"learner.dtype={d}") for d in DTYPES)
    jobs = {tmp_path / "float32": (exact, steps), tmp_path / "bfloat16": (coarse, steps)}
    (values, _), (rounded, _) = on_ranks(1, jobs)
    check(exact, alone(exact), steps, values, tmp_path / "float32")
    # Rounded as Megatron rounds: near the others, and masters move by less than bfloat16 could make_report.
    for one, other in zip(rounded, values, strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], abs=0.05)
        assert one["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=0.1)
    master = tensors_in(tmp_path / "bfloat16")["model.model.layers.0.mlp.up_proj.weight"]
    assert not torch.equal(master, master.bfloat16().float())


ROUTES = ["learner.routing_replay=true", "learner.router_aux_coef=0.1"]
EXPERTS = {
    "shared": ("moe", ["learner.backend.experts=2", *ROUTES, *CRITIC, SHARES]),
    "on all": ("qwen2_moe", [REFERENCE]),
    "tensor": ("sparse", ["learner.backend.tensor=2", *ROUTES, REFERENCE, *CRITIC, SHARES]),
    "tensor, shared": (
        "qwen2_moe",
        ["learner.backend={tensor=2, experts=2}", "learner.recompute=true", *CRITIC, SHARED],
    ),
    # Both stages have experts, and make_report the loss of them.
    "pipeline": ("sparse", ["learner.backend.pipeline=2", *ROUTES, REFERENCE, *CRITIC, SHARES]),
}


LORA = ["learner.lora={rank=4, alpha=8}", "learner.reference_kl={coef=0.1}"]
ADAPTED = {
    "tensor, int8": ("wide", ["learner.backend.tensor=2", "rollout.format=int8", *CRITIC]),
    "tensor, nf4": (
        "qwen2",
        [
            "learner.backend.tensor=2",
            "rollout.format=nf4",
            "rollout.unquantized=bf16",
            "learner.lora.targets=['q_proj', 'v_proj', 'o_proj', 'up_proj']",
            "learner.recompute=true",
            SHARES,
        ],
    ),
    "pipeline": ("qwen3", ["learner.backend.pipeline=2", "rollout.format=fp8", *CRITIC, SHARES]),
    "data": ("llama", ["rollout.format=int4", *CRITIC, SHARED]),
    "context": ("qwen3", [*SHARE_TOKENS, "rollout.format=nf4", SHARES]),
}
ADAPTED_EXPERTS = {
    "shared": ("moe", ["learner.backend.experts=2", *ROUTES, "rollout.format=nf4", SHARES]),
    "tensor": ("sparse", ["learner.backend.tensor=2", *ROUTES, "rollout.format=nf4", *CRITIC]),
    "tensor, shared": (
        "qwen2_moe",
        ["learner.backend={tensor=2, experts=2}", "learner.recompute=true", "rollout.format=bf16"],
    ),
    "data": ("qwen2_moe", ["rollout.format=nf4", *CRITIC, SHARED, SHARES]),
    "pipeline, of attention": (
        "moe",
        [
            "learner.backend.pipeline=2",
            "learner.lora.targets=['q_proj', 'o_proj']",
            "rollout.format=nf4",
        ],
    ),
}


@needs_megatron
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layouts", [ADAPTED, ADAPTED_EXPERTS], ids=["dense", "experts"])
def test_adapters_on_a_packed_base_learn_what_torch_does(
    run_of: Callable[..., Run], make_samples, on_ranks, tmp_path: Path, layouts: dict
):
    jobs, policies = {}, {}
    for name, (shape, settings) in layouts.items():
        steps = [rewarded(make_samples(15, seed), seed) for seed in range(3)]
        if layers := len(SHAPES[shape].sparse_layers):
            steps = [with_routes(step, layers) for step in steps]
        run = run_of(shape, *LORA, *settings)
        policies[name] = alone(run)
        update_policy(policies[name], steps[0])
        start(tmp_path / name, policies[name])
        jobs[tmp_path / name] = run, steps[1:]
    for (directory, (run, taken)), (values, digest) in zip(
        jobs.items(), on_ranks(2, jobs), strict=True
    ):
        policy = policies[directory.name]
        check(run, policy, taken, values, directory)
        checkpoint.restore(directory / "checkpoints", policy)
        assert VersionBuilder(run).build(policy.model, 1).manifest.digest == digest, directory.name


def with_routes(samples: list[Sample], layers: int) -> list[Sample]:
    """All but those of group 0 with recorded routes in the sparse layers."""

    def routed(s: Sample) -> Sample:
        t = s.trajectory
        first = torch.arange(len(s.prompt_ids) + t.num_tokens - 1)[:, None, None]
        first = first + torch.arange(layers)[:, None]
        routes = Array.of(torch.cat([first % 4, (first + 1) % 4], -1).numpy(), "uint8")
        return replace(s, trajectory=msgspec.structs.replace(t, routes=routes))

    return [sample if sample.ticket == 0 else routed(sample) for sample in samples]


@needs_megatron
@pytest.mark.timeout(200)
def test_experts_that_two_ranks_share_learn_what_torch_does(
    run_of: Callable[..., Run], make_samples, on_ranks, tmp_path: Path
):
    jobs, policies = {}, {}
    for name, (shape, settings) in EXPERTS.items():
        layers = len(SHAPES[shape].sparse_layers)
        steps = [rewarded(with_routes(make_samples(15, seed), layers), seed) for seed in range(3)]
        run = run_of(shape, *settings)
        policies[name] = alone(run)
        update_policy(policies[name], steps[0])
        start(tmp_path / name, policies[name])
        jobs[tmp_path / name] = run, steps[1:]
    for (directory, (run, taken)), (values, _) in zip(jobs.items(), on_ranks(2, jobs), strict=True):
        check(run, policies[directory.name], taken, values, directory)


ALIGNED = {
    "qarl, int8": ["learner.precision=qarl", "rollout.format=int8"],
    "qarl, fp8": [
        "learner.precision=qarl",
        "rollout.format=fp8",
        "rollout.unquantized=bf16",
        "learner.reference_kl={coef=0.1, reset_every=1}",
    ],
    "jet": ["learner.precision=jet", "rollout.format=fp8"],
}
# Rounding must not turn a weight's code between steps: no two orders of summation would agree after that.
SMALL_STEPS = ["learner.optimizer={lr=1e-4}"]
LAYOUTS = {
    "one": (1, "qwen3", []),
    "tensor": (2, "wide", ["learner.backend.tensor=2"]),
    "pipeline": (2, "qwen3", ["learner.backend.pipeline=2"]),
    "data": (2, "llama", []),
    "context": (2, "qwen3", SHARE_TOKENS),
    "one, experts": (1, "qwen2_moe", []),
    "experts": (2, "qwen2_moe", ["learner.backend.experts=2"]),
}
# Its weights' gradient is rounded by groups of an expert's tokens, here those of both ranks, and of a rank's
# share of a micro-batch: codes turn. So do those of tensor parallel ranks by the order in which a processor
# without AVX-512 adds up.
NOISY = ("experts, jet", "context, jet", *(() if has("avx512f") else ("tensor, jet",)))


@needs_megatron
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [1, 2])
def test_forward_on_the_rollouts_numbers_is_that_of_torch(
    run_of: Callable[..., Run], make_samples, on_ranks, tmp_path: Path, size: int
):
    steps = [make_samples(15, seed) for seed in range(2)]
    jobs = {
        tmp_path / f"{layout}, {name}": (run_of(shape, *settings, *more, *SMALL_STEPS), steps)
        for layout, (ranks, shape, more) in LAYOUTS.items()
        for name, settings in ALIGNED.items()
        if ranks == size and f"{layout}, {name}" not in NOISY
    }
    for (directory, (run, _)), (values, digest) in zip(
        jobs.items(), on_ranks(size, jobs), strict=True
    ):
        policy = alone(run)
        # Jet rounds the weights' gradient with scales of 128 neighbouring tokens: shares matter.
        tolerance = 1e-3 if directory.name == "data, jet" else 1e-5
        check(run, policy, steps, values, directory, tolerance)
        # What was published is, to the bit, what one process publishes that goes on from there.
        checkpoint.restore(directory / "checkpoints", policy)
        assert VersionBuilder(run).build(policy.model, 1).manifest.digest == digest, directory.name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (2, 2)])
def test_parts_of_all_ranks_make_every_hugging_face_tensor_once(
    shape: str, ranks: int, stages: int
):
    config = SHAPES[shape]
    state = dict(model_of(config).named_parameters())
    found: dict[str, torch.Tensor] = {}
    for entry in entries(config, stages):
        sources = [state[name].detach() for name in entry.sources]
        parts = [entry.part(sources, rank, ranks) for rank in range(ranks)]
        assert len({part.shape for part in parts}) == 1
        for name, tensor in zip(entry.sources, entry.whole(parts), strict=True):
            assert entry.copy == (name in found)
            found[name] = tensor
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], p) for name, p in state.items())


def test_rank_has_keys_beside_queries_and_gates_beside_ups():
    config = shaped(heads=4, kv_heads=2, head_dim=1)
    plan: dict[str, TensorEntry] = {entry.name: entry for entry in entries(config, 1)}
    q, k, v = (
        torch.tensor([[0.0], [1], [2], [3]]),
        torch.tensor([[10.0], [11]]),
        torch.tensor([[20.0], [21]]),
    )
    qkv = plan["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert qkv.part([q, k, v], 0, 1).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert qkv.part([q, k, v], 1, 2).flatten().tolist() == [2, 3, 11, 21]
    gate, up = torch.tensor([[0.0], [1]]), torch.tensor([[10.0], [11]])
    fc1 = plan["decoder.layers.0.mlp.linear_fc1.weight"]
    assert [fc1.part([gate, up], r, 2).flatten().tolist() for r in (0, 1)] == [[0, 10], [1, 11]]
    assert padded(257, 2) == 258


def test_experts_are_shared_out_in_their_order():
    found = [
        (entry.owner, entry.name.split(".")[6], entry.sources[0].split(".")[5])
        for entry in entries(SHAPES["moe"], 1, 2)
        if entry.owner is not None and "fc2" in entry.name
    ]
    assert found == [(0, "0", "0"), (0, "1", "1"), (1, "0", "2"), (1, "1", "3")]


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("learner.backend.experts=3", "experts = 3 does not divide"),
        ("learner.precision=qarl learner.backend.tensor=2", "learner.backend.tensor with"),
        ("learner.dtype=bfloat16", "learner.dtype"),
        ("learner.recompute=true learner.router_aux_coef=0.1", "learner.recompute"),
    ],
)
def test_settings_that_experts_exclude_are_refused_by_name(run_of, setting: str, name: str):
    with pytest.raises(ConfigError, match=name):
        check_backend(run_of("moe", *setting.split()), SHAPES["moe"])


def test_a_shared_expert_that_ranks_cannot_divide_is_refused(run_of):
    shape = shaped(experts=Experts(count=4, per_token=2, mlp=24, shared=41))
    with pytest.raises(ConfigError, match="41 channels in the shared expert"):
        check_backend(run_of("qwen2_moe", "learner.backend.tensor=2"), shape)


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ({"o_bias": True}, "biases of o_proj or the MLP"),
        ({"mlp_bias": True}, "biases of o_proj or the MLP"),
        ({"window": 4, "sliding": (0,)}, "sliding windows"),
        ({"unrotated": (1,)}, "layers without RoPE"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "scales its angles' sines"),
    ],
)
def test_variants_that_megatron_lacks_are_refused_by_name(run_of, variant: dict, name: str):
    with pytest.raises(ConfigError, match=name):
        check_backend(run_of("llama"), shaped(**variant))


def test_ranks_that_do_not_fill_the_processes_are_refused(make_run, monkeypatch):
    backend = make_run("learner.backend={type='megatron', tensor=2, pipeline=2}").learner.backend
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    with pytest.raises(ConfigError, match="pipeline = 2 times context = 1 does not divide 6"):
        require(backend, 6)
    require(backend, 8)
    shared = make_run("learner.backend={type='megatron', pipeline=2, experts=2}").learner.backend
    with pytest.raises(ConfigError, match="experts = 2 does not divide the 3 processes of a"):
        require(shared, 6)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="areal-q setup megatron"):
        require(backend, 4)


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("learner.precision=qarl learner.dtype=bfloat16", "learner.dtype"),
        ("learner.optimizer.type=muon", "learner.optimizer.type"),
    ],
)
def test_what_megatron_does_not_do_is_refused_by_name(
    make_run, monkeypatch: pytest.MonkeyPatch, setting: str, name: str
):
    from learner.multi_process import join

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=f"{name}: not with 2 processes of backend megatron"):
        join(make_run("learner.backend.type=megatron", *setting.split()))
