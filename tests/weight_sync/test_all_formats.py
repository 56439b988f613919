"""All that a learner can publish arrives bit for bit over real sockets, after the first version by deltas."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import pytest
from helpers.weight_sync import assert_same

from areal_q.config import Run
from areal_q.config.run import FormatName
from areal_q.tasks import build_tokenizer
from buffer.weight_sync import WeightServer, WeightSubscriber
from learner.backends.precision import set_precision
from learner.backends.single_device import TorchPolicy
from learner.build import build_model
from learner.data.packing import Sample
from learner.policy_update import update_policy
from learner.publishing.version_builder import VersionBuilder

MakeRun = Callable[..., Run]
MakeSamples = Callable[..., list[Sample]]

SETTINGS = {format: [f"rollout.format={format}"] for format in get_args(FormatName)} | {
    "unquantized in bf16": ["rollout.unquantized=bf16", "rollout.sticky_scales=0.05"],
    "adapters": ["learner.lora.rank=4", "rollout.format=nvfp4"],
    "noised norms": ["rollout.aqn.stages=4", "rollout.aqn.sigma_start=0.1"],
    "KV scales": ["rollout.kv_scales.margin=2.0", "rollout.engine.kv_cache=fp8"],
}


@pytest.mark.parametrize("what", SETTINGS)
def test_what_is_published_arrives_bit_for_bit_and_by_deltas(
    short_dir: Path,
    make_run: MakeRun,
    make_samples: MakeSamples,
    what: str,
) -> None:
    run = make_run("learner.optimizer.lr=1e-4", *SETTINGS[what])
    model = build_model(run, build_tokenizer(run))
    set_precision(model, run)
    policy, builder = TorchPolicy(model, run.learner, 1.0), VersionBuilder(run)
    policy.calibrate = run.rollout.kv_scales
    samples = make_samples(9, vocab=13)
    update_policy(policy, samples)
    policy.calibrate_kv_scales(samples)
    with ExitStack() as stack:
        weight_server = WeightServer(f"ipc://{short_dir}/a", f"ipc://{short_dir}/f")
        stack.callback(weight_server.close)
        subscriber = WeightSubscriber(*weight_server.endpoints, run=run.name)
        stack.callback(subscriber.close)
        for number in range(1, 4):
            made = builder.build(policy.model, number, policy.kv_scales)
            weight_server.publish(made)
            assert_same(asyncio.run(subscriber.wait()), made)
            update_policy(policy, samples)
            policy.calibrate_kv_scales(samples)
        assert (subscriber.stats.fetch.fetches, subscriber.stats.deltas) == (1, 2)
    made = builder.build(policy.model, 4, policy.kv_scales)
    assert what != "noised norms" or made.manifest.noise is not None
    assert what != "KV scales" or any("k_scale" in name for name in made.tensors)
    assert what != "adapters" or any("lora_A" in name for name in made.tensors)
