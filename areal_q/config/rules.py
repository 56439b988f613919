"""The rules of settings that cannot go together: each returns what is wrong with a run, or None.

To add one, write a function `(run) -> str | None` and list it in RULES. All rules are asked, so that all faults
are reported at once; none may raise, whatever the other settings are.
"""

import math
import re
from collections.abc import Callable

from areal_q.config.buffer import LONGEST_CLAIM_S, SHORTEST_CLAIM_S, Prioritized
from areal_q.config.engines import ScriptedEngine, SglangEngine, VllmEngine, no_adapters
from areal_q.config.environments import SingleTurn, VerifiersEnvironment
from areal_q.config.learner import MegatronBackend, PassRate, ServerTeacher
from areal_q.config.objectives import BySource, Gae
from areal_q.config.run import ROUNDS_ACTIVATIONS, WEIGHT_SCALES, Run, SmallModel
from areal_q.config.tasks import Chat, Choice, Gsm8k, Math, Mix, Python, VerifiersTask, chat_of
from areal_q.config.trackers import Mlflow, labelled

_LAST_PORT = 65535
_WILDCARDS = ("tcp://0.0.0.0:", "tcp://*:", "tcp://[::]:")
"""Endpoints that are bound on every interface begin with one of these."""


def _minibatches_divide_groups(run: Run) -> str | None:
    groups, parts = run.learner.groups, run.learner.minibatches
    if groups % parts:
        return f"learner.groups = {groups} is not a multiple of learner.minibatches = {parts}"
    return None


def _group_is_sampled(run: Run) -> str | None:
    if run.rollout.sampling.temperature == 0:
        return "rollout.sampling.temperature = 0 draws the same response for a whole group"
    return None


def _distribution_is_whole(run: Run) -> str | None:
    sampling = run.rollout.sampling
    if sampling.top_p < 1 or sampling.top_k or sampling.min_p:
        return (
            "rollout.sampling.top_p, top_k and min_p must be 1.0, 0 and 0.0 in training: the learner scores "
            "the whole distribution, so a truncated one would bias every ratio"
        )
    return None


def _critic_goes_with_gae(run: Run) -> str | None:
    gae = isinstance(run.learner.advantage, Gae)
    if gae and run.learner.critic is None:
        return "learner.advantage.type = 'gae' needs a critic: learner.critic = {}"
    if run.learner.critic and not gae:
        return "learner.critic serves learner.advantage.type = 'gae' alone"
    return None


def _advantages_have_sources(run: Run) -> str | None:
    advantage = run.learner.advantage
    if not isinstance(advantage, BySource):
        return None
    names = run.task.sources if isinstance(run.task, Mix) else {}
    for name in advantage.sources:
        if name not in names:
            known = f"it has {', '.join(names)}" if names else "task.type is not 'mix'"
            return (
                f"learner.advantage.sources.{name}: no task of the mixture has that name; {known}"
            )
    return None


def _group_has_advantages(run: Run) -> str | None:
    if run.learner.group_size < run.learner.fewest_valid:
        kind = run.learner.advantage.__struct_config__.tag
        return f"learner.group_size = 1 gives no response an advantage of type {kind!r}"
    if run.learner.group_size == 1 and run.learner.drop_uniform:
        return "learner.drop_uniform would drop every group of learner.group_size = 1"
    return None


def _small_model_reads_the_task(run: Run) -> str | None:
    """A small model knows the characters of its tasks alone, and has no chat template."""
    if not isinstance(run.model, SmallModel):
        return None
    for place, task in run.tasks.items():
        if isinstance(task, Gsm8k | Math | Choice):
            return f"{place}.type = {task.__struct_config__.tag!r} needs model.type = 'pretrained'"
        if getattr(task, "template", "plain") == "chat":
            return f"{place}.template = 'chat' needs model.type = 'pretrained'"
    return None


def _verifiers_plays_its_tasks(run: Run) -> str | None:
    """It knows no other tasks, and nothing else rewards these."""
    played = isinstance(run.rollout.environment, VerifiersEnvironment)
    for place, task in run.tasks.items():
        if isinstance(task, VerifiersTask) != played or (played and place != "task"):
            return (
                f"{place}.type = {task.__struct_config__.tag!r}: task.type and rollout.environment.type are "
                "both 'verifiers', or neither is; it is no part of a mixture or of eval.sets"
            )
    return None


def _verifiers_writes_conversations(run: Run) -> str | None:
    """Its `renderers` do, and its tasks bring their own system messages. The date is the run's beginning."""
    if not isinstance(run.task, VerifiersTask):
        return None
    for name in Chat.__struct_fields__:
        if name != "date" and getattr(run.task.chat, name) != getattr(Chat(), name):
            return (
                f"task.chat.{name} has no effect with task.type = 'verifiers', which writes conversations by "
                "task.renderer, with the taskset's system messages"
            )
    return None


def _chat_has_its_template(run: Run) -> str | None:
    for place, task in run.tasks.items():
        if chat_of(task) is None and getattr(task, "chat", Chat()) != Chat():
            return f"{place}.chat has no effect without {place}.template = 'chat'"
    return None


def _reward_has_one_file(run: Run) -> str | None:
    for name in run.sources:
        if isinstance(run.of(name).task, Python) and run.of(name).reward.path:
            place = run.place(name)
            return f"reward.path: the reward of {place}.type = 'python' is in {place}.path"
    return None


def _tasks_are_asked_alike(run: Run) -> str | None:
    """A worker has one tokenizer, with one chat template."""
    first, *others = run.tasks.items()
    for place, task in others:
        if chat_of(task) != chat_of(first[1]):
            return f"{place}: its template and chat must be those of {first[0]}"
    return None


def _sets_can_be_asked(run: Run) -> str | None:
    slots = getattr(run.rollout.engine, "slots", math.inf)
    for name, one in run.eval.sets.items():
        place = f"eval.sets.{name}"
        if isinstance(run.task, Mix) and name in run.task.sources:
            return f"{place}: a task of the mixture has that name, and accuracies under it"
        if one.path is not None and not hasattr(one.task or run.task, "path"):
            return f"{place}.path: the task reads no file; name one that does by {place}.task.type"
        if (one.samples or 0) > slots:
            return f"{place}.samples = {one.samples} is above rollout.engine.slots = {slots}"
        if not (one.samples or one.preset) and (one.temperature or one.top_p):
            return f"{place}.temperature and top_p are of samples: {place}.samples = 1 or more"
    return None


def _curriculum_has_pools(run: Run) -> str | None:
    order = run.learner.order
    if not isinstance(order, PassRate):
        return None
    if order.keep[0] > order.keep[1]:
        return f"learner.order.keep = {list(order.keep)} holds nothing: the smaller one comes first"
    if not (order.medium or order.new or order.hard or order.easy):
        return "learner.order: medium, new, hard and easy are all 0, so no problem is asked"
    return None


def _best_is_measured(run: Run) -> str | None:
    best, sets = run.eval.best, run.eval.sets
    if not best:
        return "eval.patience needs eval.best, the metric to watch" if run.eval.patience else None
    names = [*(run.task.sources if isinstance(run.task, Mix) else ()), *sets]
    _, _, rest = best.partition("/")
    name, _, what = rest.rpartition("/")
    if rest == "accuracy" or (name in names and what == "accuracy"):
        return None
    if name in sets and re.fullmatch(r"pass_at_\d+", what):
        return None
    known = ", ".join(["eval/accuracy", *(f"eval/{name}/accuracy" for name in names)])
    return f"eval.best = {best!r}: it is one of {known}, or eval/SET/pass_at_K"


def _response_fits_small_model(run: Run) -> str | None:
    if not isinstance(run.model, SmallModel):
        return None
    if run.rollout.sampling.max_tokens >= run.model.max_positions:
        return "rollout.sampling.max_tokens leaves no room in model.max_positions"
    if run.rollout.tokens_after_prompt >= run.model.max_positions:
        return "rollout.environment's results leave no room in model.max_positions"
    return None


def _response_fits_microbatch(run: Run) -> str | None:
    room, tokens = run.learner.pass_tokens, run.rollout.tokens_after_prompt
    if tokens >= room:
        return (
            f"{run.learner.pass_limit} has no room for a prompt and the {tokens} tokens that may "
            "follow it"
        )
    return None


def _group_fits_engine(run: Run) -> str | None:
    engine, size = run.rollout.engine, run.learner.group_size
    slots = math.inf if isinstance(engine, ScriptedEngine) else engine.slots
    if isinstance(run.rollout.environment, SingleTurn) and slots < size:
        return (
            f"rollout.engine.slots = {slots} has no room for a group of learner.group_size = {size}"
        )
    return None


def _vllm_takes_temperature(run: Run) -> str | None:
    temperature = run.rollout.sampling.temperature
    if isinstance(run.rollout.engine, VllmEngine) and temperature > 2:
        return f"rollout.sampling.temperature = {temperature}: vLLM takes 2 at most"
    return None


def _vllm_multiplies_int4_in_bfloat16(run: Run) -> str | None:
    engine, format = run.rollout.engine, run.rollout.format
    if (
        isinstance(engine, VllmEngine)
        and engine.dtype == "float32"
        and format in ("int4", "int4-g32")
    ):
        return (
            f"rollout.engine.dtype = 'float32' with rollout.format = {format!r}: vLLM's INT4 product takes "
            "bfloat16"
        )
    return None


def _vllm_fp8_cache_is_measured(run: Run) -> str | None:
    engine = run.rollout.engine
    if not isinstance(engine, VllmEngine) or engine.kv_cache != "fp8":
        return None
    if engine.kv_on_update == "keep":
        return "rollout.engine.kv_cache = 'fp8' needs kv_on_update = 'recompute': scales change"
    if engine.compiled:
        return "rollout.engine.kv_cache = 'fp8' needs compiled = false: its scales are observed"
    return None


def _sglang_server_has_one_worker(run: Run) -> str | None:
    engine = run.rollout.engine
    if isinstance(engine, SglangEngine) and engine.url and run.rollout.workers > 1:
        return "rollout.engine.url: a server takes weights from one worker: rollout.workers = 1"
    return None


def _kv_scales_have_an_fp8_cache(run: Run) -> str | None:
    if run.rollout.kv_scales and getattr(run.rollout.engine, "kv_cache", "auto") != "fp8":
        return "rollout.kv_scales needs rollout.engine.kv_cache = 'fp8'"
    return None


def _lora_trains_in_full_precision(run: Run) -> str | None:
    if run.learner.lora and run.learner.precision != "full":
        return (
            "learner.lora runs on the rollouts' numbers already: learner.precision must be 'full'"
        )
    return None


def _engine_adds_adapters(run: Run) -> str | None:
    lora = run.learner.lora
    return no_adapters(run.rollout.engine, run.rollout.format, lora.rank) if lora else None


def _lora_reference_is_its_base(run: Run) -> str | None:
    kl = run.learner.reference_kl
    if run.learner.lora and kl and (kl.path or kl.reset_every):
        return "learner.reference_kl: with learner.lora the reference is its base: no path, no reset_every"
    return None


def _routing_has_experts(run: Run) -> str | None:
    model, learner = run.model, run.learner
    if not isinstance(model, SmallModel):
        return None
    if model.experts == 0 and (learner.routing_replay or learner.router_aux_coef):
        return "learner.routing_replay and router_aux_coef need model.experts above 0"
    if 0 < model.experts < model.experts_per_token:
        return f"model.experts_per_token = {model.experts_per_token} of {model.experts} experts"
    return None


def _heads_divide_width(run: Run) -> str | None:
    model = run.model
    if not isinstance(model, SmallModel):
        return None
    if model.width % (2 * model.heads):  # RoPE turns pairs
        return f"model.width = {model.width} is not an even number for each of model.heads = {model.heads}"
    if model.heads % model.kv_heads:
        return f"model.heads = {model.heads} is not a multiple of model.kv_heads = {model.kv_heads}"
    return None


def _sticky_scales_are_used(run: Run) -> str | None:
    rollout, learner = run.rollout, run.learner
    if not rollout.sticky_scales:
        return None
    if learner.precision != "full":  # the learner's own forward measures ranges anew
        return "rollout.sticky_scales must be 0 where learner.precision is not 'full'"
    if learner.lora or rollout.format == "bf16":
        why = "learner.lora's base does not change" if learner.lora else "bf16 has no scales"
        return f"rollout.sticky_scales = {rollout.sticky_scales:g} does nothing: {why}; leave it 0"
    return None


def _smoothing_has_activations_to_smooth(run: Run) -> str | None:
    rollout, cfg = run.rollout, run.learner
    if rollout.smooths is None:
        return None
    formats = ROUNDS_ACTIVATIONS + WEIGHT_SCALES
    if rollout.format not in formats:
        return f"rollout.smoothing: not with {rollout.format}, only with {', '.join(formats)}"
    unaware = {
        "learner.lora": cfg.lora is not None,
        "learner.precision = 'jet'": cfg.precision == "jet",
        "learner.precision = 'qarl' of the Megatron backend": cfg.precision == "qarl"
        and isinstance(cfg.backend, MegatronBackend),
    }
    for name in (name for name, on in unaware.items() if on):
        return f"rollout.smoothing: not with {name}, whose forward pass knows no scales by channel"
    return None


def _precision_goes_with_format(run: Run) -> str | None:
    precision, format = run.learner.precision, run.rollout.format
    if precision == "jet" and format != "fp8":
        return f"learner.precision = 'jet' needs rollout.format = 'fp8', not {format!r}"
    return None


def _interpolation_needs_no_scores(run: Run) -> str | None:
    cfg = run.learner
    if cfg.proximal == "exact" or cfg.update_scores_itself:
        return None
    return (
        "learner.proximal = 'loglinear' leaves out scores before the update, which GAE, a critic, a KL in "
        "the reward, router_aux_coef, kept_tokens and the Megatron backend need"
    )


def _endpoints_have_ports(run: Run) -> str | None:
    """Each worker takes the port after the last one's; port 0 is any."""
    first = int(str(run.rollout.serve or 0).rpartition(":")[2])
    last = first + max(0, run.rollout.workers - 1)
    if first and last > _LAST_PORT:
        return f"rollout.serve: there is no port {last}"
    return None


def _workers_can_connect(run: Run) -> str | None:
    endpoints = (run.broadcast.announce, run.broadcast.fetch)
    everywhere = any((endpoint or "").startswith(_WILDCARDS) for endpoint in endpoints)
    if run.broadcast.host is None and everywhere:
        return "broadcast.host is needed: workers cannot connect to every interface"
    return None


def _step_gets_its_groups(run: Run) -> str | None:
    """A step that may draw only from more groups than there can be would wait for ever."""
    sampler, removal, groups = run.buffer.sampler, run.buffer.removal, run.learner.groups
    needed = max(groups, getattr(sampler, "min_groups", 0))
    admitted = run.learner.max_outstanding
    if needed > admitted:
        return (
            f"buffer.sampler.min_groups = {needed}, but only {admitted} groups are admitted at once"
        )
    if removal.max_groups is not None and needed > removal.max_groups:
        return f"buffer.removal.max_groups = {removal.max_groups}, but a step needs {needed} groups"
    return None


def _length_penalty_punishes_some(run: Run) -> str | None:
    overlong, longest = run.reward.overlong, run.rollout.sampling.max_tokens
    if overlong is None:
        return None
    unpunished = overlong.max_tokens - overlong.cache_tokens
    if unpunished <= 0:
        return (
            f"reward.overlong.cache_tokens = {overlong.cache_tokens} is not below max_tokens = "
            f"{overlong.max_tokens}: every response would be punished"
        )
    if unpunished >= longest:
        return (
            f"reward.overlong punishes beyond {unpunished} tokens, which no response of "
            f"rollout.sampling.max_tokens = {longest} has"
        )
    return None


def _weights_fill_bytes(run: Run) -> str | None:
    packs = run.rollout.format in ("nvfp4", "mxfp4")  # two weights to a byte
    if packs and isinstance(run.model, SmallModel) and run.model.mlp % 2:
        return (
            f"rollout.format = {run.rollout.format!r} needs an even model.mlp, not {run.model.mlp}"
        )
    return None


def _claims_outlive_heartbeats(run: Run) -> str | None:
    timeout_s = run.buffer.claim_timeout_s
    if SHORTEST_CLAIM_S <= timeout_s <= LONGEST_CLAIM_S:
        return None
    return (
        f"buffer.claim_timeout_s = {timeout_s:g} is not between {SHORTEST_CLAIM_S:g} and "
        f"{LONGEST_CLAIM_S:g}: a worker renews its claims once a second, and one late renewal must not "
        "cost it its tickets"
    )


def _tracker_has_no_password(run: Run) -> str | None:
    """config.toml would keep it, and every tracker that shows the settings."""
    for label, tracker in labelled(run.trackers).items():
        uri = tracker.uri or "" if isinstance(tracker, Mlflow) else ""
        if re.search(r"//[^/@]*:[^/@]+@", uri):
            return (
                f"trackers: the uri of {label} holds a password: MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD have it, or all of the uri is in MLFLOW_TRACKING_URI"
            )
    return None


def _teacher_reaches_every_token(run: Run) -> str | None:
    """What draws or weighs groups by rewards alone knows nothing of what a teacher has to say."""
    cfg = run.learner
    if cfg.teacher is None:
        return None
    if cfg.drop_uniform:
        return "learner.drop_uniform would drop groups from which learner.teacher has something to teach"
    if isinstance(run.buffer.sampler, Prioritized):
        return "buffer.sampler.type = 'prioritized' has no weights for the advantages of learner.teacher"
    if isinstance(cfg.teacher, ServerTeacher) and run.rollout.sampling.temperature != 1:
        return (
            "learner.teacher.type = 'server' gives log-probs at temperature 1: "
            "rollout.sampling.temperature must be 1.0"
        )
    return None


RULES: tuple[Callable[[Run], str | None], ...] = (
    _minibatches_divide_groups,
    _group_is_sampled,
    _distribution_is_whole,
    _critic_goes_with_gae,
    _advantages_have_sources,
    _group_has_advantages,
    _small_model_reads_the_task,
    _verifiers_plays_its_tasks,
    _verifiers_writes_conversations,
    _chat_has_its_template,
    _reward_has_one_file,
    _tasks_are_asked_alike,
    _sets_can_be_asked,
    _curriculum_has_pools,
    _best_is_measured,
    _response_fits_small_model,
    _response_fits_microbatch,
    _group_fits_engine,
    _vllm_takes_temperature,
    _vllm_multiplies_int4_in_bfloat16,
    _vllm_fp8_cache_is_measured,
    _sglang_server_has_one_worker,
    _kv_scales_have_an_fp8_cache,
    _lora_trains_in_full_precision,
    _engine_adds_adapters,
    _lora_reference_is_its_base,
    _routing_has_experts,
    _heads_divide_width,
    _sticky_scales_are_used,
    _smoothing_has_activations_to_smooth,
    _precision_goes_with_format,
    _interpolation_needs_no_scores,
    _endpoints_have_ports,
    _workers_can_connect,
    _step_gets_its_groups,
    _length_penalty_punishes_some,
    _weights_fill_bytes,
    _claims_outlive_heartbeats,
    _tracker_has_no_password,
    _teacher_reaches_every_token,
)


def broken_rules(run: Run) -> list[str]:
    """Returns what is wrong with `run`, one line for each rule that it breaks."""
    return [reason for rule in RULES if (reason := rule(run))]
