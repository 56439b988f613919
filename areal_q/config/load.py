"""Settings = defaults ← TOML file ← `a.b=c` overrides: merged as tables, converted once."""

import hashlib
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_q.config import shipped
from areal_q.config.buffer import LONGEST_CLAIM_S, SHORTEST_CLAIM_S, Prioritized, Uniform
from areal_q.config.engines import (
    EngineConfig,
    ScriptedEngine,
    SglangEngine,
    VllmEngine,
    no_adapters,
)
from areal_q.config.environments import CalculatorTool, SingleTurn
from areal_q.config.faults import fault
from areal_q.config.objectives import Gae
from areal_q.config.run import (
    BroadcastConfig,
    LearnerConfig,
    Run,
    SmallModel,
)
from areal_q.config.tasks import Choice, Gsm8k, Math, Python
from areal_q.errors import ConfigError

Table = dict[str, Any]
COMMAND_LINE = "on the command line"


def load(path: str | Path | None = None, overrides: list[str] | None = None) -> Run:
    """The settings of a run, from a file or a configuration that comes with the program, by its name.

    Raises ConfigError with the file or dotted path at fault.
    """
    if path is None:
        return parse("", "settings", overrides)
    try:
        text = shipped.find(Path(path)).read_text(
            "utf-8-sig"
        )  # a BOM is what editors on Windows write
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error}") from error
    return parse(text, str(path), overrides)


def parse(toml: str, source: str, overrides: list[str] | None = None) -> Run:
    """Like `load`, from the text of a file; `source` names it in errors."""
    try:
        table = tomllib.loads(toml)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: {error}") from error
    return _overridden(table, source, overrides or [])


def override(run: Run, *overrides: str) -> Run:
    """`run` with `a.b=c` settings replaced, checked like a file."""
    return _overridden(msgspec.to_builtins(run), "settings", overrides)


def _overridden(table: Table, source: str, overrides: Sequence[str]) -> Run:
    """A fault that `table` does not have by itself is blamed on the command line."""
    together = table
    for text in overrides:
        together = merge(together, _parse_override(text))
    try:
        return _convert(together, source)
    except ConfigError as error:
        if overrides and _complaint(table, source) != str(error):
            _convert(together, COMMAND_LINE)
        raise


def _complaint(table: Table, source: str) -> str | None:
    try:
        _convert(table, source)
    except ConfigError as error:
        return str(error)
    return None


def merge(base: Table, over: Table) -> Table:
    """Recursive merge; a table whose `type` changes is replaced, since its knobs are others."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        if (
            isinstance(value, dict)
            and isinstance(old, dict)
            and value.get("type", old.get("type")) == old.get("type")
        ):
            out[key] = merge(old, value)
        else:
            out[key] = value
    return out


def _convert(table: Table, source: str) -> Run:
    table = merge(msgspec.to_builtins(Run()), table)
    try:
        return _check(_with_schedule(msgspec.convert(table, Run)), source)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {fault(error, table)}") from error


def _with_schedule(run: Run) -> Run:
    """`run` whose noise has its length written out, since `steps` may change when a run resumes: what was
    published before must stay what it was."""
    aqn = run.rollout.aqn
    if aqn is None or aqn.steps:
        return run
    rollout = msgspec.structs.replace(
        run.rollout, aqn=msgspec.structs.replace(aqn, steps=run.steps)
    )
    return msgspec.structs.replace(run, rollout=rollout)


def _check(run: Run, source: str) -> Run:
    """Pairs of settings that cannot go together."""
    learner, sampling, engine = run.learner, run.rollout.sampling, run.rollout.engine
    reason = None
    if learner.groups % learner.minibatches:
        reason = (
            f"learner.groups = {learner.groups} is not a multiple of "
            f"learner.minibatches = {learner.minibatches}"
        )
    elif sampling.temperature == 0:
        reason = "rollout.sampling.temperature = 0 draws the same response for a whole group"
    elif sampling.top_p < 1 or sampling.top_k or sampling.min_p:
        # The learner scores the whole distribution: a truncated one would bias every ratio.
        reason = "rollout.sampling.top_p, top_k and min_p must be 1.0, 0 and 0.0 in training"
    elif isinstance(learner.advantage, Gae) and learner.critic is None:
        reason = "learner.advantage.type = 'gae' needs a critic: learner.critic = {}"
    elif learner.critic and not isinstance(learner.advantage, Gae):
        reason = "learner.critic serves learner.advantage.type = 'gae' alone"
    elif learner.group_size < learner.fewest_valid:
        kind = learner.advantage.__struct_config__.tag
        reason = f"learner.group_size = 1 gives no response an advantage of type {kind!r}"
    elif learner.group_size == 1 and learner.drop_uniform:
        reason = "learner.drop_uniform would drop every group of learner.group_size = 1"
    elif isinstance(run.model, SmallModel) and isinstance(run.task, (Gsm8k, Math, Choice)):
        kind = run.task.__struct_config__.tag
        reason = f"task.type = {kind!r} needs model.type = 'pretrained'"
    elif isinstance(run.model, SmallModel) and getattr(run.task, "template", "plain") == "chat":
        reason = "task.template = 'chat' needs model.type = 'pretrained'"
    elif isinstance(run.task, Python) and run.reward.path:
        reason = "reward.path: the reward of task.type = 'python' is in task.path"
    elif isinstance(run.model, SmallModel) and sampling.max_tokens >= run.model.max_positions:
        reason = "rollout.sampling.max_tokens leaves no room in model.max_positions"
    elif isinstance(run.model, SmallModel) and tokens_after_prompt(run) >= run.model.max_positions:
        reason = "rollout.environment's results leave no room in model.max_positions"
    elif tokens_after_prompt(run) >= learner.microbatch_tokens:
        reason = (
            f"learner.microbatch_tokens = {learner.microbatch_tokens} has no room for a prompt and the "
            f"{tokens_after_prompt(run)} tokens that may follow it"
        )
    elif isinstance(run.rollout.environment, SingleTurn) and _slots(engine) < learner.group_size:
        reason = (
            f"rollout.engine.slots = {_slots(engine)} has no room for a group of "
            f"learner.group_size = {learner.group_size}"
        )
    elif isinstance(engine, VllmEngine) and sampling.temperature > 2:
        reason = f"rollout.sampling.temperature = {sampling.temperature}: vLLM takes 2 at most"
    elif (
        isinstance(engine, VllmEngine)
        and engine.dtype == "float32"
        and run.rollout.format == "int4"
    ):
        reason = (
            "rollout.engine.dtype = 'float32' with rollout.format = 'int4': "
            "vLLM's INT4 product takes bfloat16"
        )
    elif (
        isinstance(engine, VllmEngine)
        and engine.kv_cache == "fp8"
        and engine.kv_on_update == "keep"
    ):
        reason = "rollout.engine.kv_cache = 'fp8' needs kv_on_update = 'recompute': scales change"
    elif isinstance(engine, VllmEngine) and engine.kv_cache == "fp8" and engine.compiled:
        reason = "rollout.engine.kv_cache = 'fp8' needs compiled = false: its scales are observed"
    elif isinstance(engine, SglangEngine) and engine.url and run.rollout.workers > 1:
        reason = "rollout.engine.url: a server takes weights from one worker: rollout.workers = 1"
    elif run.rollout.kv_scales and getattr(engine, "kv_cache", "auto") != "fp8":
        reason = "rollout.kv_scales needs rollout.engine.kv_cache = 'fp8'"
    elif learner.lora and learner.precision != "full":
        reason = (
            "learner.lora runs on the rollouts' numbers already: learner.precision must be 'full'"
        )
    elif (lora := learner.lora) and (why := no_adapters(engine, run.rollout.format, lora.rank)):
        reason = why
    elif learner.lora and (kl := learner.reference_kl) and (kl.path or kl.reset_every):
        reason = "learner.reference_kl: with learner.lora the reference is its base: no path, no reset_every"
    elif isinstance(run.model, SmallModel) and (problem := _experts(run.model, learner)):
        reason = problem
    elif learner.precision != "full" and run.rollout.sticky_scales:
        # The learner's own forward measures ranges anew.
        reason = "rollout.sticky_scales must be 0 where learner.precision is not 'full'"
    elif learner.precision == "jet" and run.rollout.format != "fp8":
        reason = (
            f"learner.precision = 'jet' needs rollout.format = 'fp8', not {run.rollout.format!r}"
        )
    elif isinstance(run.model, SmallModel) and (problem := _heads(run.model)):
        reason = problem
    elif _last_port(run) > 65535:
        reason = f"rollout.serve: there is no port {_last_port(run)}"
    elif run.broadcast.host is None and _on_every_interface(run.broadcast):
        reason = "broadcast.host is needed: workers cannot connect to every interface"
    reason = reason or _starves(run) or _means_nothing(run)
    reason = reason or _outruns_heartbeats(run.buffer.claim_timeout_s)
    if reason:
        raise ConfigError(f"{source}: {reason}")
    return run


def _slots(engine: EngineConfig) -> float:
    return math.inf if isinstance(engine, ScriptedEngine) else engine.slots


def tokens_after_prompt(run: Run) -> int:
    """Tokens that can follow a prompt."""
    tool = run.rollout.environment
    results = tool.max_calls * tool.max_result_tokens if isinstance(tool, CalculatorTool) else 0
    return run.rollout.sampling.max_tokens + results


def _experts(model: SmallModel, learner: LearnerConfig) -> str | None:
    """What a small model's experts, or their absence, do not go with."""
    if model.experts == 0:
        asked = learner.routing_replay or learner.router_aux_coef
        return (
            "learner.routing_replay and router_aux_coef need model.experts above 0"
            if asked
            else None
        )
    if model.experts_per_token > model.experts:
        return f"model.experts_per_token = {model.experts_per_token} of {model.experts} experts"
    return None


def _heads(model: SmallModel) -> str | None:
    """Why a small model's width does not make whole heads."""
    if model.width % (2 * model.heads):  # RoPE turns pairs
        return f"model.width = {model.width} is not an even number for each of model.heads = {model.heads}"
    if model.heads % model.kv_heads:
        return f"model.heads = {model.heads} is not a multiple of model.kv_heads = {model.kv_heads}"
    return None


def _last_port(run: Run) -> int:
    """Of the endpoints of all workers; 0 where there are none, or any will do."""
    first = int(str(run.rollout.serve or 0).rpartition(":")[2])
    return first + max(0, run.rollout.workers - 1) if first else 0


def _outruns_heartbeats(claim_timeout_s: float) -> str | None:
    """Why a worker that lives could lose its tickets to the others."""
    if SHORTEST_CLAIM_S <= claim_timeout_s <= LONGEST_CLAIM_S:
        return None
    return (
        f"buffer.claim_timeout_s = {claim_timeout_s:g} is not between {SHORTEST_CLAIM_S:g} and "
        f"{LONGEST_CLAIM_S:g}: a worker renews its claims once a second, and one late renewal must not "
        "cost it its tickets"
    )


def _means_nothing(run: Run) -> str | None:
    """Why a setting would be taken and do nothing, or not what it says."""
    rollout, learner, overlong = run.rollout, run.learner, run.reward.overlong
    if overlong and overlong.cache_tokens >= overlong.max_tokens:
        return (
            f"reward.overlong.cache_tokens = {overlong.cache_tokens} is not below max_tokens = "
            f"{overlong.max_tokens}: every response would be punished"
        )
    if overlong and overlong.max_tokens - overlong.cache_tokens >= rollout.sampling.max_tokens:
        return (
            f"reward.overlong punishes beyond {overlong.max_tokens - overlong.cache_tokens} tokens, which no "
            f"response of rollout.sampling.max_tokens = {rollout.sampling.max_tokens} has"
        )
    if rollout.sticky_scales and (learner.lora or rollout.format == "bf16"):
        why = "learner.lora's base does not change" if learner.lora else "bf16 has no scales"
        return f"rollout.sticky_scales = {rollout.sticky_scales:g} does nothing: {why}; leave it 0"
    if learner.precision == "qarl" and rollout.format == "bf16":
        return "learner.precision = 'qarl' needs a quantized rollout.format, not 'bf16'"
    packs = rollout.format in ("nvfp4", "mxfp4")  # two weights to a byte
    if packs and isinstance(run.model, SmallModel) and run.model.mlp % 2:
        return f"rollout.format = {rollout.format!r} needs an even model.mlp, not {run.model.mlp}"
    return None


def _starves(run: Run) -> str | None:
    """Why a step could wait for ever: it may draw only from more groups than there can be."""
    sampler, removal, groups = run.buffer.sampler, run.buffer.removal, run.learner.groups
    needed = (
        max(groups, sampler.min_groups) if isinstance(sampler, Uniform | Prioritized) else groups
    )
    admitted = run.learner.max_outstanding
    if needed > admitted:
        return (
            f"buffer.sampler.min_groups = {needed}, but only {admitted} groups are admitted at once"
        )
    if removal.max_groups is not None and needed > removal.max_groups:
        return f"buffer.removal.max_groups = {removal.max_groups}, but a step needs {needed} groups"
    return None


def _on_every_interface(broadcast: BroadcastConfig) -> bool:
    wildcards = ("tcp://0.0.0.0:", "tcp://*:", "tcp://[::]:")
    return any((e or "").startswith(wildcards) for e in (broadcast.announce, broadcast.fetch))


def _parse_override(text: str) -> Table:
    """`a.b=1.5` as {"a": {"b": 1.5}}. The value is TOML; a bare word is a string."""
    path, sep, raw = text.partition("=")
    if not sep or not path.strip():
        raise ConfigError(f"{COMMAND_LINE}: {text!r} is no setting: write a.b=value")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    table: Table = {}
    leaf = table
    *parents, last = path.strip().split(".")
    for key in parents:
        leaf = leaf.setdefault(key, {})
    leaf[last] = value
    return table


def settings_hash(run: Run) -> str:
    """Of all settings but the run's name and place: equal hashes are equal settings."""
    table = msgspec.to_builtins(run, order="sorted")
    table = {key: value for key, value in table.items() if key not in ("name", "root")}
    return hashlib.blake2b(msgspec.json.encode(table), digest_size=16).hexdigest()


def workers_hash(run: Run) -> str:
    """A hash of what rollout workers are set up from: settings, and the files of a reward that a user wrote."""
    rollout = msgspec.structs.replace(run.rollout, workers=1, serve=None)
    # A worker follows a learner to other endpoints as it is.
    broadcast = msgspec.structs.replace(run.broadcast, announce=None, fetch=None, host=None)
    learner = (run.learner.max_lag, run.learner.group_size, run.learner.routing_replay)
    parts = (run.model, run.task, run.reward, rollout, run.buffer, broadcast, learner)
    digest = hashlib.blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=16)
    for path in (run.reward.path, run.task.path if isinstance(run.task, Python) else None):
        if path and Path(path).is_file():
            digest.update(Path(path).read_bytes())
    return digest.hexdigest()


def dump_toml(run: Run) -> str:
    """The resolved settings as TOML that `load` reads back to an equal Run.

    None cannot be written in TOML and is left out; every optional setting defaults to it.
    """
    import tomli_w

    def drop_none(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: drop_none(v) for k, v in value.items() if v is not None}
        return value

    return tomli_w.dumps(drop_none(msgspec.to_builtins(run)))
