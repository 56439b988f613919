"""Versions are made beside the next learner step, and are of the weights that they were begun with."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers.fixture_types import MakeRun, MakeSamples
from helpers.policies import build_policy

from areal_q.config import Run
from areal_q.errors import QuantizationError
from areal_q.weights.version import WeightVersion
from learner.policy_update import update_policy
from learner.publishing.version_builder import VersionBuilder
from learner.publishing.weight_publisher import WeightPublisher


class Slow(VersionBuilder):
    """Makes a version only once it may."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.may = threading.Event()

    def build(self, *args: Any, **named: Any) -> WeightVersion:
        self.may.wait()
        return super().build(*args, **named)


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("learner.precision=qarl",),
        ("learner.lora.rank=4", "learner.optimizer.lr=0.1"),
        ("rollout.unquantized=bf16", "rollout.sticky_scales=0.05"),
    ],
)
def test_a_version_is_of_the_weights_it_began_with(
    make_run: MakeRun, make_samples: MakeSamples, settings: tuple[str, ...]
) -> None:
    run = make_run("learner.optimizer.lr=0.01", *settings)
    policy, builder = build_policy(run), Slow(run)
    publisher = WeightPublisher(builder, lambda _: None)
    policy.readers.append(publisher.wait_until_read)
    before = copy.deepcopy(policy.model.state_dict())
    wanted = VersionBuilder(run).build(policy.model, 1)
    publisher.begin(policy.model, 1, {})
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(update_policy, policy, make_samples(9, vocab=13))
        with pytest.raises(TimeoutError):
            step.result(timeout=0.5)
        now = policy.model.state_dict()
        assert all(torch.equal(now[name], tensor) for name, tensor in before.items())
        builder.may.set()
        step.result()
    made = publisher.wait_until_out()
    publisher.close()
    assert made is not None and made.manifest.digest == wanted.manifest.digest
    now = policy.model.state_dict()
    assert not all(torch.equal(now[name], tensor) for name, tensor in before.items())


def test_versions_are_handed_over_in_order_before_the_wait_ends(
    make_run: MakeRun,
) -> None:
    run = make_run()
    model, announced = build_policy(run).model, []
    publisher = WeightPublisher(
        VersionBuilder(run),
        lambda made: announced.append(made.manifest.version),
    )
    for version in range(5):
        publisher.begin(model, version, {})
        made = publisher.wait_until_out()
        assert made is not None and made.manifest.version == version
        assert announced == list(range(version + 1))
    assert publisher.wait_until_out() is None
    publisher.close()


def test_weights_that_are_not_finite_are_handed_to_nobody(
    make_run: MakeRun,
) -> None:
    run = make_run()
    model, announced = build_policy(run).model, []
    publisher = WeightPublisher(VersionBuilder(run), announced.append)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "q_proj" in n).fill_(torch.nan)
    publisher.begin(model, 1, {})
    publisher.wait_until_read()
    with pytest.raises(QuantizationError, match="q_proj"):
        publisher.wait_until_out()
    publisher.close()
    assert announced == []
