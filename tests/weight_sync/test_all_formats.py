"""All that a learner can publish arrives bit for bit over real sockets, after the first version by deltas."""

from typing import get_args

import pytest
from helpers.fixture_types import MakeRun, MakeSamples
from helpers.policies import build_policy
from helpers.weight_sync import WeightSync, arrive

from areal_q.config import BroadcastConfig
from areal_q.config.run import FormatName
from learner.policy_update import update_policy
from learner.publishing.version_builder import VersionBuilder

CONFIG = BroadcastConfig()
SETTINGS = {format: [f"rollout.format={format}"] for format in get_args(FormatName)} | {
    "unquantized in bf16": ["rollout.unquantized=bf16", "rollout.sticky_scales=0.05"],
    "adapters": ["learner.lora.rank=4", "rollout.format=nvfp4"],
    "noised norms": ["rollout.aqn.stages=4", "rollout.aqn.sigma_start=0.1"],
    "KV scales": ["rollout.kv_scales.margin=2.0", "rollout.engine.kv_cache=fp8"],
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", SETTINGS)
def test_what_is_published_arrives_bit_for_bit_and_by_deltas(
    sync: WeightSync, make_run: MakeRun, make_samples: MakeSamples, what: str
) -> None:
    run = make_run("learner.optimizer.lr=1e-4", *SETTINGS[what])
    policy, builder = build_policy(run), VersionBuilder(run)
    policy.calibrate = run.rollout.kv_scales
    samples = make_samples(9, vocab=13)
    update_policy(policy, samples)
    policy.calibrate_kv_scales(samples)
    subscriber = sync.follow(silence_s=10.0)
    for number in range(1, 4):
        made = builder.build(policy.model, number, policy.kv_scales)
        sync.server.publish(made)
        arrive(subscriber, made)
        update_policy(policy, samples)
        policy.calibrate_kv_scales(samples)
    assert (subscriber.stats.fetch.fetches, subscriber.stats.deltas) == (1, 2)
    made = builder.build(policy.model, 4, policy.kv_scales)
    assert what != "noised norms" or made.manifest.noise is not None
    assert what != "KV scales" or any("k_scale" in name for name in made.tensors)
    assert what != "adapters" or any("lora_A" in name for name in made.tensors)
