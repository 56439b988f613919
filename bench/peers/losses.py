"""The loss functions of verl 0.9, areal 1.0 and trl 1.16, called on one padded batch: theirs, unchanged.

Only for the environment of requirements.txt. Each call takes a `Padded` batch and returns the peer's scalar
loss, with gradient into `batch.logprobs`; the peer is imported at its first call.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false

import importlib
import importlib.util
import sys
import types
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from areal_q.algorithms import LossInputs


@dataclass(frozen=True, kw_only=True)
class Padded:
    """B responses, padded on the right to T tokens, as all three peers hold them; [B, T] each."""

    logprobs: Tensor
    """A leaf with gradient"""
    proximal: Tensor
    behavior: Tensor
    advantages: Tensor
    mask: Tensor
    """bool: also False on a tool's tokens inside a response"""
    lengths: Tensor
    """int64 [B]: tokens of each response; what lies beyond is padding"""

    def pack(self, **more: Tensor) -> LossInputs:
        """The same responses without padding, in our layout; `more` are further [B, T] inputs by name."""
        here = torch.arange(self.mask.shape[1]) < self.lengths[:, None]
        given = {name: x[here] for name, x in more.items()}
        return LossInputs(
            logprobs=self.logprobs[here],
            proximal_logprobs=self.proximal[here],
            behavior_logprobs=self.behavior[here],
            advantages=self.advantages[here],
            mask=self.mask[here],
            sequence_ids=torch.arange(len(self.lengths)).repeat_interleave(self.lengths),
            num_sequences=len(self.lengths),
            version_lag=torch.zeros(int(self.lengths.sum()), dtype=torch.int64),
            **given,
        )


def verl_loss(
    batch: Padded,
    name: str = "vanilla",
    aggregation: str = "token-mean",
    *,
    old: Tensor | None = None,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """A policy loss of verl's registry. Dual clip is always on there, here at 10¹² if not given."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    settings = {"clip_ratio_c": 1e12, **settings}
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **settings)
    loss, _ = get_policy_loss_fn(name)(
        old_log_prob=batch.proximal if old is None else old,
        log_prob=batch.logprobs,
        advantages=batch.advantages,
        response_mask=(batch.mask if mask is None else mask).to(batch.logprobs.dtype),
        loss_agg_mode=aggregation,
        config=config,
        rollout_is_weights=weights,
    )
    return loss


def verl_correction(batch: Padded, **settings: Any) -> tuple[Tensor | None, Tensor]:
    """verl's rollout correction: weights (None: not asked for) and the mask after rejection, [B, T] each."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    weights, mask, _ = compute_rollout_correction_and_rejection_mask(
        batch.proximal, batch.behavior, batch.mask.to(batch.logprobs.dtype), **settings
    )
    return None if weights is None else weights.batch["rollout_is_weights"], mask


def areal_loss(
    batch: Padded, *, rejection: dict[str, Any] | None = None, **settings: Any
) -> Tensor:
    """areal's decoupled PPO loss; `rejection` are the fields of its RejectionSamplingConfig."""
    functional, config = areal("utils.functional.functional"), areal("api.cli_args")
    loss, _ = functional.ppo_actor_loss_fn(
        logprobs=batch.logprobs,
        proximal_logprobs=settings.pop("proximal", batch.proximal),
        old_logprobs=batch.behavior,
        advantages=batch.advantages,
        loss_mask=batch.mask,
        rejection_sampling=rejection and config.RejectionSamplingConfig(**rejection),
        **{"eps_clip": 0.2, **settings},
    )
    return loss


def areal(module: str) -> types.ModuleType:
    """A module of areal, without its packages' own imports of servers, launchers and loggers."""
    _bare_areal()
    return importlib.import_module(f"areal.{module}")


@cache
def _bare_areal() -> None:
    for name in ("areal", "areal.infra", "areal.trainer", "areal.trainer.ppo"):
        spec = importlib.util.find_spec(name)
        package = types.ModuleType(name)
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules[name] = package
    for name in ("RolloutController", "TrainController"):  # base classes of what is not called here
        setattr(sys.modules["areal.infra"], name, type(name, (), {}))


def trl_loss(batch: Padded, *, ratio: Tensor | None = None, **settings: Any) -> Tensor:
    """TRL's GRPOTrainer._compute_loss; `ratio` is its importance_sampling_ratio, `settings` GRPOConfig's."""
    kl = settings.pop("reference", None)
    trainer = trl_trainer(**settings, vllm_importance_sampling_correction=ratio is not None)
    trainer.use_vllm = ratio is not None
    entropy = torch.zeros_like(batch.mask, dtype=batch.logprobs.dtype)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (batch.logprobs, entropy, None)
    ids = batch.mask.long()
    inputs = {
        "prompt_ids": ids[:, :0],
        "prompt_mask": ids[:, :0],
        "completion_ids": ids,
        "completion_mask": ids,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.proximal,
        "num_items_in_batch": ids.sum(),
        "importance_sampling_ratio": ratio,
        "ref_per_token_logps": kl,
    }
    return trainer._compute_loss(None, inputs)


def trl_scored(
    rewards: Tensor,
    group_size: int,
    batch: Padded,
    **settings: Any,
) -> dict[str, Tensor]:
    """What TRL makes of completions: `advantages` [B] and `importance_sampling_ratio` [B, T] or [B, 1].

    GRPOTrainer._generate_and_score_completions with the engine's, the learner's and the rewards' numbers given.
    """
    trainer = trl_trainer(
        num_generations=group_size, per_device_train_batch_size=len(rewards), **settings
    )
    trainer.use_vllm = True
    ids = [[1] * int(n) for n in batch.lengths]
    sampled = [row[: int(n)].tolist() for row, n in zip(batch.behavior, batch.lengths, strict=True)]
    tools = [
        row[: int(n)].long().tolist() for row, n in zip(batch.mask, batch.lengths, strict=True)
    ]
    proximal = batch.proximal[:, : int(batch.lengths.max())]
    generated = ([[1]] * len(ids), ids, tools, [""] * len(ids), sampled, {}, None, None)
    trainer._generate = lambda prompts: generated
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (proximal, None, None)
    trainer._calculate_rewards = lambda *_: rewards[:, None]
    return trainer._generate_and_score_completions([{"prompt": "?"} for _ in ids])


def trl_trainer(**settings: Any) -> Any:
    """A GRPOTrainer without model and data, holding what `_compute_loss` reads, as its constructor sets it."""
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir="unused",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **{"beta": 0.0, **settings},
    )
    trainer = object.__new__(GRPOTrainer)
    trainer.args = args
    same = (
        "loss_type",
        "importance_sampling_level",
        "beta",
        "top_entropy_quantile",
        "num_generations",
    )
    same += ("off_policy_mask_threshold", "vllm_importance_sampling_mode", "scale_rewards")
    same += ("vllm_importance_sampling_correction", "max_completion_length")
    same += ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min")
    same += ("mask_truncated_completions", "num_iterations", "multi_objective_aggregation")
    for name in same:
        setattr(trainer, name, getattr(args, name))
    trainer.epsilon_low = args.epsilon
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = trainer.use_adaptive_entropy = False
    trainer.entropy_coef = 0.0
    trainer.model = types.SimpleNamespace(training=True, is_gradient_checkpointing=False)
    trainer.ref_model = None
    trainer.environment_factories = trainer.environments = None
    trainer.tools, trainer.pad_to_multiple_of, trainer._tokenizer = [], None, _Tokenizer()
    trainer.reward_weights, trainer.reward_func_names = torch.ones(1), ["reward"]
    trainer.reward_funcs, trainer.log_multimodal = [None], False
    trainer.accelerator = _OneProcess()
    trainer._metrics = {"train": defaultdict(list)}
    trainer._logs = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
    trainer._pending_extra_logs, trainer._pending_metrics = {}, {}
    return trainer


class _Tokenizer:
    pad_token_id = 0


class _OneProcess:
    """Of accelerate's Accelerator what TRL asks in a single process."""

    device = torch.device("cpu")
    num_processes = 1
    process_index = 0
    sync_gradients = True

    def gather(self, x: Tensor) -> Tensor:
        return x

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x
