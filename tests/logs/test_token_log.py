"""The token log: what a step computed for each token, taken down without changing the step."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.policies import build_policy
from helpers.readers import iter_tokens
from hypothesis import given
from hypothesis import strategies as st

from areal_q.config import load
from areal_q.errors import RecordError
from buffer.logs import parquet_log
from buffer.logs.token_log import MARKS, TokenLog, TokenScores, tokens_to_table
from learner.backends.single_device import TorchPolicy
from learner.measure.step_logs import StepLogs
from learner.measure.token_recorder import TokenRecorder
from learner.policy_update import update_policy


@pytest.fixture
def build(make_run):
    """build("learner.epochs=2") is a policy of a tiny model."""

    def make(*settings: str) -> TorchPolicy:
        run = make_run(*settings)
        return build_policy(run)

    return make


@pytest.mark.parametrize("objective", ["ppo", "acr", "icepop", "tbpo", "gspo"])
def test_the_logged_tokens_add_up_to_the_metrics_of_the_step(build, make_samples, objective):
    recorder = TokenRecorder()
    settings = [
        "learner.minibatches=4",
        "learner.optimizer.lr=0.05",
        "learner.microbatch_tokens=40",
    ]
    policy = build(*settings, f"learner.objective.type={objective}")
    metrics = update_policy(policy, make_samples(24), recorder)
    scores = recorder.scores()
    counted = scores.mask
    weight = np.exp(scores.proximal_logprobs.astype(float) - scores.behavior_logprobs)[counted]
    ratio = np.exp(scores.logprobs.astype(float) - scores.proximal_logprobs)[counted]
    assert metrics["mismatch/tokens"] == counted.sum()
    assert metrics["mismatch/weight_mean"] == pytest.approx(weight.mean(), rel=1e-5)
    assert metrics["policy/ratio_mean"] == pytest.approx(ratio.mean(), rel=1e-5)
    assert metrics["policy/ratio_max"] == pytest.approx(ratio.max(), rel=1e-5)
    for mark, name in (
        ("clipped_up", "policy/clip_fraction_up"),
        ("clipped_down", "policy/clip_fraction_down"),
        ("clipped_dual", "policy/clip_fraction_dual"),
        ("truncated", "mismatch/truncated_fraction"),
        ("dropped", "policy/mask_fraction"),
    ):
        share = ((scores.marks & MARKS[mark]) != 0)[counted].mean()
        assert share == pytest.approx(metrics[name]), mark
    assert (scores.marks[counted] != 0).any()


def test_the_tap_changes_no_bit_of_a_step(build, make_samples):
    settings = ("learner.epochs=2", "learner.minibatches=2", "learner.optimizer.lr=0.02")
    plain, tapped = build(*settings), build(*settings)
    for seed in range(2):
        samples = make_samples(12, seed)
        assert update_policy(plain, samples) == update_policy(tapped, samples, TokenRecorder())
    ours, theirs = plain.model.state_dict(), tapped.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_every_response_is_logged_once_over_several_epochs(build, make_samples):
    recorder = TokenRecorder()
    samples = make_samples(12)
    settings = ("learner.epochs=3", "learner.optimizer.lr=0.05", "learner.microbatch_tokens=30")
    update_policy(build(*settings), samples, recorder)
    scores = recorder.scores()
    rows = np.split(np.arange(scores.lengths.sum()), np.cumsum(scores.lengths)[:-1])
    keys = list(zip(scores.number.tolist(), scores.index.tolist(), strict=True))
    assert sorted(keys) == sorted((s.ticket, s.trajectory.index) for s in samples)
    for sample in samples:
        mine = rows[keys.index((sample.ticket, sample.trajectory.index))]
        behavior = sample.trajectory.behavior_logprobs.numpy()
        np.testing.assert_array_equal(scores.behavior_logprobs[mine], behavior)
        np.testing.assert_array_equal(scores.lag[mine], sample.lag)
        np.testing.assert_allclose(scores.advantages[mine], sample.advantage, rtol=1e-6)
    # After three epochs of updates the last visit is far from the policy before them.
    assert np.abs(scores.logprobs - scores.proximal_logprobs).max() > 0.05


def make_scores(lengths: list[int], seed: int = 0) -> TokenScores:
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)

    def logs() -> np.ndarray:
        return (-5 * rng.random(tokens)).astype(np.float32)

    return TokenScores(
        number=np.arange(len(lengths)) // 2,
        index=np.arange(len(lengths)) % 2,
        lengths=np.array(lengths),
        proximal_logprobs=logs(),
        logprobs=logs(),
        entropy=-logs(),
        advantages=logs(),
        lag=rng.integers(0, 4, tokens).astype(np.int32),
        marks=rng.integers(0, 32, tokens).astype(np.uint8),
        behavior_logprobs=logs(),
        mask=rng.random(tokens) < 0.8,
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(0, 2**32 - 1))
def test_scores_come_back_from_a_table_as_they_were(lengths, seed):
    scores = make_scores(lengths, seed)
    rows = tokens_to_table(7, scores).to_pylist()
    ends = np.cumsum(lengths)
    for i, row in enumerate(rows):
        mine = slice(ends[i] - lengths[i], ends[i])
        assert (row["step"], row["number"], row["index"]) == (7, i // 2, i % 2)
        for name in ("proximal_logprobs", "logprobs", "entropy", "advantages", "lag", "marks"):
            assert row[name] == getattr(scores, name)[mine].tolist()
        gap = np.abs(scores.proximal_logprobs - scores.behavior_logprobs)[mine][scores.mask[mine]]
        assert row["largest_gap"] == (gap.max() if gap.size else 0)
        assert row["marked"] == (scores.marks[mine][scores.mask[mine]] != 0).sum()


def test_reopening_at_a_step_drops_the_abandoned_steps(tmp_path):
    log = TokenLog(tmp_path)
    for step in range(6):
        log.append(step, make_scores([3, 1], step))
    log.close()
    TokenLog(tmp_path, resume_at=4).close()
    found = dict(iter_tokens(tmp_path))
    assert sorted(found) == [0, 1, 2, 3]
    assert found[3].equals(tokens_to_table(3, make_scores([3, 1], 3)))


@pytest.mark.parametrize("off", ["buffer.log=false", "buffer.tokens=false", "buffer.tokens=true"])
def test_a_log_that_is_off_by_now_forgets_an_abandoned_history(tmp_path, off):
    """The last is off with several ranks. The report joined what it had kept to other responses."""
    log = TokenLog(tmp_path / "tokens")
    for step in range(6):
        log.append(step, make_scores([3, 1], step))
    log.close()
    StepLogs(load(None, [off]), tmp_path, 4, scores_here=False).close()
    assert sorted(dict(iter_tokens(tmp_path / "tokens"))) == [0, 1, 2, 3]


def test_a_slow_run_s_steps_can_be_read_while_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_log, "PART_S", 0.0)
    log = TokenLog(tmp_path)
    log.append(0, make_scores([2]))
    log.append(1, make_scores([2]))
    while not (tmp_path / "part-000001.parquet").exists():
        pass
    assert [step for step, _ in iter_tokens(tmp_path)] == [0, 1]
    log.close()


def test_another_log_is_refused(tmp_path):
    pq.write_table(pa.table({"step": [1]}), tmp_path / "part-000000.parquet")
    with pytest.raises(RecordError, match="part-000000"):
        list(iter_tokens(tmp_path))
