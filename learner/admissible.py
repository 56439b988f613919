"""What fits the model that is learnt: settings about experts, and groups that come from elsewhere."""

from collections.abc import Callable

from areal_q.config import LearnerConfig
from areal_q.errors import ConfigError, RecordError
from areal_q.messages import Group, Trajectory
from areal_q.models import DecoderConfig


def check_experts(config: DecoderConfig, cfg: LearnerConfig) -> None:
    """Raises ConfigError for settings that need experts where there are none, or none where there are."""
    if config.sparse_layers:
        if cfg.lora:
            raise ConfigError("learner.lora: not with a mixture of experts")
        return
    for name in ("routing_replay", "router_aux_coef"):
        if getattr(cfg, name):
            raise ConfigError(f"learner.{name}: {config.family} has no experts")


def fits(config: DecoderConfig) -> Callable[[Group], None]:
    """A check that raises RecordError for a group whose tokens or routes are not those of such a model."""

    def check(group: Group) -> None:
        where = f"group of ticket {group.ticket.number}"
        for t in group.trajectories:
            if t.response_ids.numpy().max() >= config.vocab_size:
                raise RecordError(
                    f"{where}, trajectory {t.index}: a token outside of {config.vocab_size}"
                )
            _check_routes(t, config, f"{where}, trajectory {t.index}")

    return check


def _check_routes(t: Trajectory, config: DecoderConfig, where: str) -> None:
    if t.routes is None:
        return
    experts, layers = config.experts, len(config.sparse_layers)
    if not experts or t.routes.shape[1:] != (layers, experts.per_token):
        raise RecordError(f"{where}: routes {list(t.routes.shape)} of another model")
    if t.routes.numpy().max() >= experts.count:
        raise RecordError(f"{where}: routes to more than {experts.count} experts")
