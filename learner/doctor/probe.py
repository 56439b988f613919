"""The doctor's measurements: during a replay, every logged token is scored by the policies between behaviour
and learner (the chain in learner/doctor/diagnosis/token_ratios.py).

An exact replay computes all versions of its steps again, so that the weights of version u are available without
a checkpoint of u. This takes the memory of three or four copies of the model for each of the newest max_lag + 1
versions.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from areal_q.config import Run
from areal_q.models import Decoder
from areal_q.models.low_bit.bf16_rounding import round_frozen, round_rest
from areal_q.models.low_bit.engine_policy import perturbed
from areal_q.models.low_bit.lora import adapted
from areal_q.models.low_bit.published_state import published_state
from areal_q.models.low_bit.quantized_forward import QuantLinear, fold, linears, use
from areal_q.quant import dequantize_state
from areal_q.quant.aqn import noise_of, with_noise
from areal_q.quant.rescaling import Fold
from areal_q.quant.smoothing import SmoothingScales
from areal_q.quant.state_dict import parts_of, rest_in_bf16
from areal_q.quant.sticky_scales import StickyRanges
from buffer.sampling.replay_pool import SampledGroups
from learner.backends.single_device import TorchPolicy
from learner.data.packing import Sample, samples_of
from learner.data.staleness import VersionHistory
from learner.doctor.diagnosis import TERMS, TokenTable
from learner.measure.rescore import Scorer

_UNKNOWN = -1


class VersionPolicies:
    """The policies of one version: as learnt, with the published noise, with quantized weights, and as the
    engine runs it. `sticky` and `smoothing` are the ranges and the scales by channel with which it was
    published, if it was."""

    def __init__(
        self,
        model: Decoder,
        run: Run,
        number: int,
        sticky: StickyRanges | None = None,
        smoothing: SmoothingScales | None = None,
    ) -> None:
        format, rollout = run.rollout.format, run.rollout
        noise = noise_of(rollout.aqn, number, run.seed)
        self.learnt = copy.deepcopy(model).requires_grad_(False)
        self.noisy, left = self.learnt, dict[str, Fold]()  # what linears do themselves
        if noise or smoothing:
            self.noisy = copy.deepcopy(self.learnt)
            state = with_noise(model.state_dict(), noise, run.learner.uaq)
            folds = smoothing.folds(state) if smoothing else {}
            left = _left_to_linears(folds)
            done = {n: f.of(state[n]) for n, f in folds.items() if not f.at_input}
            self.noisy.load_state_dict({**state, **done})
            fold(self.noisy, left)
        if adapted(self.noisy):  # a model with adapters runs on the published tensors already
            if noise and rollout.rounds_rest:
                round_frozen(self.noisy)
            self.dequantized = self.engine = self.noisy
            return
        published = published_state(self.noisy, format, sticky, folds=left)
        if rollout.rounds_rest:
            published = rest_in_bf16(published, format)
        self.dequantized = copy.deepcopy(self.noisy)
        self.dequantized.load_state_dict(dequantize_state(published, format))
        self.engine = copy.deepcopy(self.noisy)
        use(QuantLinear, self.engine, format)
        if sticky or left:
            for name, linear in linears(self.engine).items():
                linear.fold = left.get(f"{name}.weight")  # type: ignore[assignment]
                linear.take(parts_of(published, name, format))  # type: ignore[attr-defined]
        round_rest(self.engine, rollout.rounds_rest)


def _left_to_linears(folds: Mapping[str, Fold]) -> dict[str, Fold]:
    """Returns what linears do themselves of `folds`, whose other scales are in the weights already."""
    own = {n: f if f.at_input else Fold(clip=f.clip) for n, f in folds.items()}
    return {n: f for n, f in own.items() if f.at_input or f.clip is not None}


@dataclass
class Probe:
    """Measures the steps from `first` on. A replay calls it before every step (`Replay.steps`)."""

    run: Run
    first: int
    versions: dict[int, VersionPolicies] = field(default_factory=dict)
    parts: list[TokenTable] = field(default_factory=list)
    responses: int = 0
    rounding: list[np.ndarray] = field(default_factory=list)
    """What a perturbed pass of each version's engine changes, float64 [N] nats of tokens that count"""

    def __call__(
        self, policy: TorchPolicy, step: int, batch: SampledGroups, history: VersionHistory
    ) -> None:
        keep = self.run.learner.max_lag + 1
        self.versions = {v: self.versions[v] for v in self.versions if v > step - keep}
        if step > self.first - keep:
            self.versions[step] = VersionPolicies(
                policy.model, self.run, step, policy.sticky, policy.smoothing
            )
        if step >= self.first:
            cfg = policy.cfg
            samples = samples_of(batch, cfg.advantage, history, step, cfg.mask)
            sampling = [
                group.ticket.sampling.temperature
                for group in batch.groups
                for t in group.valid_trajectories
                for _ in (t, *t.branches)
            ]
            self.parts.append(self._measure(policy, step, samples, sampling, history))
            self.responses += len(samples)

    def table(self) -> TokenTable:
        """Returns all measured tokens that count and have finite log-probs."""
        names = TokenTable.__dataclass_fields__
        return TokenTable(**{n: np.concatenate([getattr(p, n) for p in self.parts]) for n in names})

    def noise_rms(self) -> float:
        """Returns the root mean square of `rounding`, in nats; 0 if nothing was measured."""
        found = np.concatenate([np.zeros(0), *self.rounding])
        return float(np.sqrt(np.mean(found**2))) if len(found) else 0.0

    def _measure(
        self,
        policy: TorchPolicy,
        step: int,
        samples: Sequence[Sample],
        temperatures: list[float],
        history: VersionHistory,
    ) -> TokenTable:
        score = Scorer(policy.cfg)
        proximal, entropy = score(policy.model, samples, policy.temperature)
        spans = [s.trajectory.spans for s in samples]
        version = np.concatenate(
            [np.repeat([self._known(x, history) for x in y], [x.tokens for x in y]) for y in spans]
        )
        first_span = np.concatenate(
            [np.arange(s.trajectory.num_tokens) < s.trajectory.spans[0].tokens for s in samples]
        )
        logged = [s.trajectory.behavior_logprobs.numpy() for s in samples]
        behavior = np.concatenate(logged).astype(np.float64)
        lengths = [s.trajectory.num_tokens for s in samples]
        terms = np.full((len(behavior), len(TERMS)), np.nan)
        for u in np.unique(version[version != _UNKNOWN]):
            mine = version == u
            given = samples, mine, temperatures, policy.temperature
            chain = self._chain(score, self.versions[int(u)], *given)
            levels = np.stack([proximal, *chain, behavior])[:, mine]
            split = -np.diff(levels, axis=0)
            rest, begun = split[-1], first_span[mine]
            terms[mine] = np.stack(
                [*split[:-1], np.where(begun, 0.0, rest), np.where(begun, rest, 0.0)], axis=1
            )
        table = TokenTable(
            step=np.full(len(behavior), step), lag=np.concatenate([s.lag for s in samples]),
            position=np.concatenate([np.arange(n) for n in lengths]),
            response=np.repeat(np.arange(len(samples)) + self.responses, lengths),
            advantage=np.concatenate([s.advantages for s in samples]),
            behavior=behavior, proximal=proximal, entropy=entropy, terms=terms,
        )  # fmt: skip
        return table.where(np.concatenate([s.counted for s in samples]) & np.isfinite(behavior))

    def _known(self, span, history: VersionHistory) -> int:
        """Returns the version that drew `span`, or _UNKNOWN if its weights, told by their digest, are not
        there."""
        same = history.digests.get(span.version) == span.digest
        return span.version if same and span.version in self.versions else _UNKNOWN

    def _chain(
        self,
        score: Scorer,
        version: VersionPolicies,
        samples: Sequence[Sample],
        mine: np.ndarray,
        temperatures: list[float],
        learner: float,
    ) -> list[np.ndarray]:
        """Returns five times log-probs, float64 [N] nats: under θ_u, θ_u + Z, deq Q, π_Q, and π_Q at the
        recorded temperatures. They are valid only for the tokens of `mine`, bool [N]. `learner` is the
        learner's own temperature."""
        ends = np.cumsum([s.trajectory.num_tokens for s in samples])
        chosen = [i for i, part in enumerate(np.split(mine, ends[:-1])) if part.any()]
        some = [samples[i] for i in chosen]
        places = np.concatenate(
            [np.arange(ends[i] - samples[i].trajectory.num_tokens, ends[i]) for i in chosen]
        )
        found = [score(version.learnt, some, learner)[0]]
        quiet = version.noisy is version.learnt
        found.append(found[0] if quiet else score(version.noisy, some, learner)[0])
        found += [score(m, some, learner)[0] for m in (version.dequantized, version.engine)]
        with perturbed(version.engine):
            noisy = score(version.engine, some, learner)[0]
        counted = mine[places] & np.concatenate([s.counted for s in some])
        self.rounding.append((noisy - found[-1])[counted])
        last = found[-1].copy()
        recorded = np.repeat(
            [temperatures[i] for i in chosen], [samples[i].trajectory.num_tokens for i in chosen]
        )
        for t in sorted({temperatures[i] for i in chosen} - {learner, 0.0}):
            last[recorded == t] = score(version.engine, some, t)[0][recorded == t]
        out = []
        for values in (*found, last):
            whole = np.zeros(len(mine))
            whole[places] = values
            out.append(whole)
        return out
