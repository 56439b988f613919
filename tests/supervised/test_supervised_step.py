"""A supervised step beside transformers' own loss on the same rows, and its micro-batches beside one batch."""

import json
from pathlib import Path

import pytest
import torch
from helpers.chain_models import byte_tokenizer
from helpers.fixture_types import MakeRun
from helpers.policies import build_policy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from areal_q.config import Chat, Sft
from areal_q.models import PackedLayout, load_decoder
from areal_q.tasks import load_tokenizer
from learner.backends.single_device import TorchPolicy
from learner.policy_update import SingleProcessUpdater
from learner.supervised.demonstrations import encoded, read_demonstrations, sample_of
from learner.supervised.supervised_step import held_out_loss, learn, share_right, supervised

ROWS = [
    [("user", "2+2?"), ("assistant", "4")],
    [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye")],
    [("user", "1"), ("assistant", "one"), ("user", "2"), ("assistant", "two, of course")],
    [("user", "a long question " * 3), ("assistant", "no")],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small Llama of random weights and a tokenizer of bytes, with ChatML."""
    path, hf = tmp_path_factory.mktemp("model"), byte_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(hf), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    hf.save_pretrained(path)
    rows = [{"messages": [{"role": r, "content": c} for r, c in row]} for row in ROWS]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def policy_of(make_run: MakeRun, model: Path, *settings: str) -> TorchPolicy:
    run = make_run("learner.optimizer.lr=0", "learner.max_grad_norm=inf", *settings)
    return TorchPolicy(load_decoder(model), supervised(run).learner, 1.0)


def read(model: Path) -> list[tuple[list[int], list[bool]]]:
    rows = read_demonstrations(Sft(path=str(model / "rows.jsonl"), heldout=0)).train
    tokenizer = load_tokenizer(model, Chat())
    return [encoded(row, tokenizer) for row in rows]


def kept_gradient(policy: TorchPolicy) -> dict[str, torch.Tensor]:
    """The dict into which the next optimizer step puts the gradient that it is given."""
    kept: dict[str, torch.Tensor] = {}
    step = policy.optimizer.step

    def keep() -> None:
        kept.update(
            {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}
        )
        step()

    policy.optimizer.step = keep  # type: ignore[method-assign]
    return kept


@pytest.mark.parametrize("microbatch_tokens", [4096, 96])
def test_loss_and_gradient_are_those_of_transformers(
    make_run: MakeRun, model: Path, microbatch_tokens: int
):
    policy = policy_of(make_run, model, f"learner.microbatch_tokens={microbatch_tokens}")
    rows = read(model)
    gradient = kept_gradient(policy)
    values = learn(SingleProcessUpdater(policy), [sample_of(n, *row) for n, row in enumerate(rows)])

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels, attends = torch.full_like(ids, -100), torch.zeros_like(ids)
    for n, (row, learnt) in enumerate(rows):
        ids[n, : len(row)], attends[n, : len(row)] = torch.tensor(row), 1
        labels[n, : len(row)] = torch.tensor(row).where(torch.tensor(learnt), -100)
    loss = theirs(input_ids=ids, attention_mask=attends, labels=labels).loss
    loss.backward()
    assert values["train/loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert values["train/tokens"] == (labels != -100).sum()
    wanted = {n: p.grad for n, p in theirs.named_parameters()}
    assert gradient.keys() == wanted.keys()
    for name, own in gradient.items():
        torch.testing.assert_close(own, wanted[name], atol=1e-5, rtol=1e-4)
    assert held_out_loss(policy, [sample_of(n, *row) for n, row in enumerate(rows)]) == (
        pytest.approx(loss.item(), abs=1e-5)
    )


def test_a_supervised_step_leaves_out_what_only_rl_has(make_run: MakeRun):
    """Whatever the settings of RL are, the loss is the cross-entropy."""
    losses = []
    for settings in (
        (),
        ("learner.objective.type=tbpo", "learner.entropy_coef=0.1", "learner.epochs=2"),
        ("learner.advantage.type=gae", "learner.critic={}", "rollout.sampling.temperature=0.7"),
        ("learner.reference_kl={coef=0.5}", "learner.proximal=loglinear"),
    ):
        run = supervised(make_run("learner.optimizer.lr=1e-3", *settings))
        samples = [sample_of(n, [3 + n, 4, 5, 1], [False, True, True, True]) for n in range(6)]
        policy = build_policy(run)
        values = learn(SingleProcessUpdater(policy), samples)
        assert values.keys() >= {"train/loss", "train/lr", "train/grad_norm", "train/tokens"}
        assert not [name for name in values if name.startswith(("mismatch", "policy/kl", "lag"))]
        losses.append((values["train/loss"], held_out_loss(policy, samples)))
    assert losses == [losses[0]] * 4
    assert losses[0][1] < losses[0][0]


def test_the_share_that_is_right_is_that_of_greedy_decoding(make_run: MakeRun):
    policy = build_policy(supervised(make_run()))
    ids = [3, 4]
    with torch.no_grad():
        for _ in range(3):
            hidden = policy.model(torch.tensor(ids), PackedLayout.of([len(ids)]))
            ids.append(int(policy.model.logits(hidden[-1]).argmax()))
    mask = [False, False, True, True, True]
    wrong = [*ids[:-1], (ids[-1] + 1) % 20]
    masked = [False, False, True, True, False]
    rows = [(ids, mask), (wrong, mask), (wrong, masked)]
    assert share_right(policy, [sample_of(n, *row) for n, row in enumerate(rows)]) == 2 / 3
