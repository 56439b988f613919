"""The fidelity meter: whether an engine's log-probs are those that its weights give.

A sample of the groups that were learnt from is scored again with exactly the tensors that were published as
their version, quantized as in the engine, everything else in float32. The remaining gap comes from the engine:
its kernels, its rounding, its bugs. Unlike mismatch/kl, it contains no effect of quantization or lag.

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
from areal_q.models.low_bit.lora import LORA_SCALE
from areal_q.weights.version import WeightVersion
from learner.data.packing import Sample
from learner.measure.rescore import Scorer, empty_engine_policy, load_published

logger = logging.getLogger(__name__)

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
        """Returns the mean and the largest |gap| in nats per token, over all engines and for each, the newest
        version measured, and the bound; the bound alone if no token was measured. Logs a warning the first time
        that an engine's mean exceeds the bound."""
        if not self._cfg.share:
            return {}
        gaps: dict[str, list[np.ndarray]] = defaultdict(list)
        newest: dict[str, int] = {}
        for engine, version, gap in self._gaps([g for g in groups if self._chosen(g)]):
            gaps[engine].append(gap)
            newest[engine] = max(version, newest.get(engine, 0))
        joined = {engine: np.concatenate(parts) for engine, parts in gaps.items()}
        joined = {engine: gap for engine, gap in joined.items() if gap.size}
        values = {"fidelity/bound_nats": self._cfg.bound_nats}
        for engine, gap in joined.items():
            values |= _summary(f"fidelity/engine_{engine}/", gap)
            values[f"fidelity/engine_{engine}/version"] = newest[engine]
            self._warn(engine, float(gap.mean()))
        if joined:
            values |= _summary("fidelity/", np.concatenate(list(joined.values())))
        return values

    def _chosen(self, group: Group) -> bool:
        """Returns True if the group is measured: of every 1/share blocks of neighbours the first is."""
        block, share = group.ticket.number // BLOCK, self._cfg.share
        return block == 0 or int(block * share) > int((block - 1) * share)

    def _gaps(self, groups: Sequence[Group]) -> Iterator[tuple[str, int, np.ndarray]]:
        """Yields (engine, version, |gap| of N tokens, float64 [N] nats) for each engine, version and
        temperature."""
        alike: dict[tuple[str, str, float], list[Sample]] = defaultdict(list)
        for group in groups:
            for sample in _samples(group):
                digest = sample.trajectory.spans[0].digest
                if digest in self._versions:
                    alike[group.engine, digest, group.ticket.sampling.temperature].append(sample)
        for (engine, digest, temperature), samples in alike.items():
            logprobs, _ = self._score(self._policy_of(digest), samples, temperature)
            version = self._versions[digest].manifest.version
            yield engine, version, _gap(samples, logprobs)

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

    def _warn(self, engine: str, mean: float) -> None:
        if mean > self._cfg.bound_nats and engine not in self._warned:
            self._warned.add(engine)
            logger.warning(
                "engine %s: its log-probs are %.3g nats a token from those of its weights, "
                "beyond learner.fidelity.bound_nats = %s",
                engine,
                mean,
                self._cfg.bound_nats,
            )


def _samples(group: Group) -> Iterator[Sample]:
    for t in group.trajectories:
        yield Sample(
            ticket=group.ticket.number,
            prompt_ids=group.ticket.prompt_ids.numpy(),
            trajectory=t,
            advantage=0.0,
            lag=np.zeros(t.num_tokens, np.int64),
        )


def _gap(samples: Sequence[Sample], logprobs: np.ndarray) -> np.ndarray:
    """Returns |recorded − `logprobs`| in nats of the sampled tokens that each response's first version drew."""
    trajectories = [s.trajectory for s in samples]
    recorded = np.concatenate([t.behavior_logprobs.numpy() for t in trajectories])
    drawn = np.concatenate([t.loss_mask.numpy() != 0 for t in trajectories])
    first = np.concatenate([np.arange(t.num_tokens) < t.spans[0].tokens for t in trajectories])
    return np.abs(recorded.astype(np.float64) - logprobs)[drawn & first]


def _summary(prefix: str, gap: np.ndarray) -> dict[str, float]:
    return {f"{prefix}gap_mean_nats": float(gap.mean()), f"{prefix}gap_max_nats": float(gap.max())}
