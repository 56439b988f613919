"""The fidelity meter: whether an engine's log-probs are those that its weights give.

A sample of the groups that were learnt from is scored again with exactly the tensors that were published as
their version, quantized as in the engine, everything else in float32. The remaining gap comes from the engine:
its kernels, its rounding, its bugs. Unlike the mismatch KL, it contains no effect of quantization or lag.

Where a format rounds activations, a deep model turns float32's own rounding into a gap of tenths of a nat
between two correct engines (areal_q/models/low_bit/engine_policy.py). So where a gap exceeds the setting, a
second, perturbed pass measures this noise on the same tokens, and the bound is what noise alone may reach:

    bound = max(bound_nats, MARGIN · mean|noise| + SIGMAS · √(2/N) · std|noise|)

On 96 tokens of SmolLM2-135M in int8 four perturbed passes were 0.15 to 0.19 nats from the plain one. Twice the
scale of one down_proj is at 0.44 and is found; of one q_proj or up_proj at 0.16 and 0.24, and 1.1 times that of
the down_proj at 0.14: these stay hidden in the noise. All scales 2 % too large are at 0.22.

Only tokens of a response's first version are measured, as later ones may depend on cached keys and values of
the version before. Since the meter needs only the trajectory, it works for every engine.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from areal_q.config import LearnerConfig
from areal_q.messages import Group
from areal_q.models import Decoder, DecoderConfig
from areal_q.models.low_bit.engine_policy import empty_engine_policy, load_published, perturbed
from areal_q.models.low_bit.lora import LORA_SCALE
from areal_q.weights.version import WeightVersion
from learner.data.packing import Sample, unlearnt_samples
from learner.measure.rescore import Scorer

logger = logging.getLogger(__name__)

MARGIN, SIGMAS = 1.25, 3.0
"""How far a faithful engine's mean gap may exceed the mean noise: for other kernels, and for chance"""
BLOCK = 16
"""Groups of neighbouring tickets that are measured together, since a few of them cost nearly as much"""


class FidelityMeter:
    """Measures the gap of each engine. It keeps the newest `versions_kept` published versions, in memory that
    it shares with the weight server, and one policy that is given the tensors of each in turn, since making its
    modules takes longer than scoring a few responses. It has no influence on the step."""

    def __init__(self, learner: LearnerConfig, format: str) -> None:
        """`format` is the number format of the rollouts."""
        self._cfg, self._device = learner.fidelity, learner.device
        self._format = format
        self._keep = learner.versions_kept
        self._score = Scorer(learner)
        self._versions: dict[str, WeightVersion] = {}
        self._policy: Decoder | None = None
        self._loaded = ""
        """Digest of the version whose tensors the policy has"""
        self._warned: set[str] = set()

    def remember(self, version: WeightVersion) -> None:
        """Keeps a published version, by its digest, and drops the oldest if there are too many."""
        if not self._cfg.share:
            return
        self._versions[version.manifest.digest] = version
        for digest in list(self._versions)[: -self._keep]:
            del self._versions[digest]

    def measure(self, groups: Sequence[Group]) -> dict[str, float]:
        """Returns the mean and the largest |gap| in nats per token, over all engines and for each; and for each
        the newest version measured, the bound, and the mean noise where the gap exceeds the setting; nothing if
        no token was measured. Logs a warning the first time that an engine's mean exceeds its bound."""
        if not self._cfg.share:
            return {}
        found: dict[str, list[np.ndarray]] = defaultdict(list)
        newest: dict[str, int] = {}
        for engine, version, gap in self._gaps([g for g in groups if self._chosen(g)]):
            found[engine].append(gap)
            newest[engine] = max(version, newest.get(engine, 0))
        joined = {engine: np.concatenate(parts, axis=1) for engine, parts in found.items()}
        joined = {engine: both for engine, both in joined.items() if both.size}
        values: dict[str, float] = {}
        for engine, (gap, noise) in joined.items():
            prefix = f"fidelity/engine_{engine}/"
            bound = max(self._cfg.bound_nats, reach(noise))
            values |= _summary(prefix, gap)
            values |= {f"{prefix}version": newest[engine], f"{prefix}bound_nats": bound}
            if noise.any():
                values[f"{prefix}noise_mean_nats"] = float(noise.mean())
            self._warn(engine, float(gap.mean()), bound)
        if joined:
            values |= _summary("fidelity/", np.concatenate([gap for gap, _ in joined.values()]))
        return values

    def _chosen(self, group: Group) -> bool:
        """Returns True if the group is measured: of every 1/share blocks of neighbours the first is."""
        block, share = group.ticket.number // BLOCK, self._cfg.share
        return block == 0 or int(block * share) > int((block - 1) * share)

    def _gaps(self, groups: Sequence[Group]) -> Iterator[tuple[str, int, np.ndarray]]:
        """Yields (engine, version, |gap| and |noise| of N tokens, float64 [2, N] nats) for each engine, version
        and temperature; noise is 0 where it was not measured, as the gap does not exceed the setting."""
        alike: dict[tuple[str, str, float], list[Sample]] = defaultdict(list)
        for group in groups:
            for sample in unlearnt_samples([group]):
                digest = sample.trajectory.spans[0].digest
                if digest in self._versions:
                    alike[group.engine, digest, group.ticket.sampling.temperature].append(sample)
        for (engine, digest, temperature), samples in alike.items():
            policy = self._policy_of(digest)
            logprobs, _ = self._score(policy, samples, temperature)
            drawn = _drawn(samples)
            recorded = [s.trajectory.behavior_logprobs.numpy() for s in samples]
            gap = np.abs(np.concatenate(recorded).astype(float) - logprobs)[drawn]
            noise = np.zeros_like(gap)
            if gap.size and gap.mean() > self._cfg.bound_nats:
                with perturbed(policy):
                    noise = np.abs(self._score(policy, samples, temperature)[0] - logprobs)[drawn]
            yield engine, self._versions[digest].manifest.version, np.stack((gap, noise))

    def _policy_of(self, digest: str) -> Decoder:
        version = self._versions[digest]
        if self._policy is None:
            config = DecoderConfig.from_hf(version.manifest.model)
            self._policy = empty_engine_policy(config, self._format)
        if digest != self._loaded:
            scale = float(version.manifest.extra.get(LORA_SCALE, 0.0))
            load_published(self._policy, version.tensors, self._device, scale)
            self._loaded = digest
        return self._policy

    def _warn(self, engine: str, mean: float, bound: float) -> None:
        if mean > bound and engine not in self._warned:
            self._warned.add(engine)
            told = "learner.fidelity.bound_nats =" if bound == self._cfg.bound_nats else "noise,"
            logger.warning(
                "engine %s: its log-probs are %.3g nats a token from those of its weights, beyond %s %.3g",
                engine,
                mean,
                told,
                bound,
            )


def reach(noise: np.ndarray) -> float:
    """Returns how large the mean gap of a faithful engine may be, in nats, for |noise|, float64 [N]."""
    return float(MARGIN * noise.mean() + SIGMAS * noise.std() * np.sqrt(2 / noise.size))


def _drawn(samples: Sequence[Sample]) -> np.ndarray:
    """Returns True for the sampled tokens that each response's first version drew, bool [N]."""
    trajectories = [s.trajectory for s in samples]
    drawn = np.concatenate([t.loss_mask.numpy() != 0 for t in trajectories])
    first = np.concatenate([np.arange(t.num_tokens) < t.spans[0].tokens for t in trajectories])
    return drawn & first


def _summary(prefix: str, gap: np.ndarray) -> dict[str, float]:
    return {f"{prefix}gap_mean_nats": float(gap.mean()), f"{prefix}gap_max_nats": float(gap.max())}
