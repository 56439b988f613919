"""Micro-batches in several threads: the same bits as one after the other, from the same cuts."""

import os
import sys
import threading

import numpy as np
import pytest
import torch
from helpers.commands import stretched
from helpers.fixture_types import MakeRun, MakeSamples
from helpers.policies import build_policy

from learner import policy_update as step_module
from learner.backends.microbatch_threads import MicrobatchThreads
from learner.measure.token_recorder import TokenRecorder
from learner.policy_update import prepare_minibatches, update_policy

SETTINGS = {
    "float32": [],
    "bfloat16": ["learner.dtype=bfloat16"],
    "epochs": ["learner.epochs=2", "learner.minibatches=2"],
    "critic": ["learner.advantage.type=gae", "learner.critic={}"],
    "reference": ["learner.reference_kl={}", "learner.entropy_coef=0.01"],
    "qarl": ["learner.precision=qarl", "rollout.format=int8"],
    "jet": ["learner.precision=jet", "rollout.format=fp8", "learner.dtype=bfloat16"],
    "lora": ["learner.lora.rank=4", "rollout.format=nvfp4", "learner.reference_kl={}"],
    "experts": ["model.experts=4", "learner.router_aux_coef=0.1"],
    "recompute": ["learner.recompute=true", "learner.dtype=bfloat16"],
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_threads_give_the_bits_of_one(
    make_run: MakeRun,
    make_samples: MakeSamples,
    monkeypatch: pytest.MonkeyPatch,
    settings: list[str],
):
    monkeypatch.setattr(step_module, "_FEWEST", 1)
    outcomes = []
    # As many tokens are in memory at once, so that micro-batches have the same size.
    for threads, tokens in ((1, 40), (3, 120)):
        more = [f"learner.threads={threads}", f"learner.microbatch_tokens={tokens}"]
        policy, recorder = build_policy(make_run(*settings, *more)), TokenRecorder()
        for seed in (1, 2):
            values = update_policy(policy, make_samples(80, seed), recorder)
        del values[step_module.MICROBATCH]
        outcomes.append((policy.model.state_dict(), values, recorder.scores()))
    (one, metrics, tokens), (several, same_metrics, same_tokens) = outcomes
    assert all(torch.equal(weight, several[name]) for name, weight in one.items())
    assert metrics == same_metrics
    assert vars(tokens).keys() == vars(same_tokens).keys()
    for name, column in vars(tokens).items():
        assert np.array_equal(column, getattr(same_tokens, name)), name


def test_a_minibatch_is_cut_for_all_threads_if_that_pays(
    make_run: MakeRun, make_samples: MakeSamples
):
    two = build_policy(make_run("learner.threads=2", "learner.minibatches=1"))

    def sizes(count: int) -> list[int]:
        (minibatch,) = prepare_minibatches(two, make_samples(count))
        return [sum(batch.layout.lengths) for batch, _ in minibatch]

    assert len(sizes(200)) == 1
    assert len(several := sizes(2000)) == 4
    assert min(several) > 0.8 * max(several)


def test_a_large_model_divides_its_products_instead(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("learner.backends.single_device.SMALL", 1000)
    assert build_policy(make_run("learner.threads=2")).parallel == 1


def test_threads_work_at_once_and_give_results_in_order():
    threads, together = MicrobatchThreads(2), threading.Barrier(2, timeout=stretched(60))

    def compute(place: int) -> tuple[int, bool, int]:
        together.wait()
        return place, torch.is_grad_enabled(), torch.get_num_threads()

    with torch.no_grad():
        assert list(threads.map(compute, 4)) == [(i, False, 1) for i in range(4)]
    assert [enabled for _, enabled, _ in threads.map(compute, 2)] == [True, True]


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_further_threads_give_way_to_other_processes():
    together, usual = (
        threading.Barrier(2, timeout=stretched(60)),
        os.getpriority(os.PRIO_PROCESS, 0),
    )

    def priority(place: int) -> int:
        together.wait()
        return os.getpriority(os.PRIO_PROCESS, 0)

    found = list(MicrobatchThreads(2).map(priority, 2))
    assert min(found) == usual < max(found) or usual == 19  # the lowest that there is
    assert os.getpriority(os.PRIO_PROCESS, 0) == usual


def test_a_fault_of_one_thread_is_the_callers():
    def compute(place: int) -> int:
        if place == 1:
            raise ValueError("ticket 7")
        return place

    with pytest.raises(ValueError, match="ticket 7"):
        list(MicrobatchThreads(2).map(compute, 3))
