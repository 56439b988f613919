"""The rules of settings that cannot go together, by subject: each yields what is wrong with a run.

To add one, yield it where its subject is, or write a function `(run) -> Iterator[str]` and list it in RULES.
All are asked, so that all faults are reported at once; none may raise, whatever the other settings are.
"""

import math
import re
from collections.abc import Callable, Iterator

from areal_q.config.buffer import LONGEST_CLAIM_S, SHORTEST_CLAIM_S, Prioritized
from areal_q.config.engines import ScriptedEngine, SglangEngine, VllmEngine, no_adapters, vllm_draws
from areal_q.config.environments import SingleTurn, VerifiersEnvironment
from areal_q.config.learner import MegatronBackend, PassRate, ServerTeacher
from areal_q.config.objectives import BySource, Gae
from areal_q.config.run import (
    LARGEST_MASK,
    LARGEST_MASKS,
    ROUNDS_ACTIVATIONS,
    WEIGHT_SCALES,
    Run,
    SmallModel,
)
from areal_q.config.tasks import Chat, Choice, Gsm8k, Math, Mix, Python, VerifiersTask, chat_of
from areal_q.config.trackers import Mlflow, labelled

_LAST_PORT = 65535
_WILDCARDS = ("tcp://0.0.0.0:", "tcp://*:", "tcp://[::]:")
"""Endpoints that are bound on every interface begin with one of these."""


def _groups(run: Run) -> Iterator[str]:
    groups, parts, admitted = (
        run.learner.groups,
        run.learner.minibatches,
        run.learner.max_outstanding,
    )
    removal, timeout_s = run.buffer.removal, run.buffer.claim_timeout_s
    if groups % parts:
        yield f"learner.groups = {groups} is not a multiple of learner.minibatches = {parts}"
    # A step that may draw only from more groups than there can be would wait for ever.
    needed = max(groups, getattr(run.buffer.sampler, "min_groups", 0))
    if needed > admitted:
        yield f"buffer.sampler.min_groups = {needed}, but only {admitted} groups are admitted at once"
    elif removal.max_groups is not None and needed > removal.max_groups:
        yield f"buffer.removal.max_groups = {removal.max_groups}, but a step needs {needed} groups"
    if not SHORTEST_CLAIM_S <= timeout_s <= LONGEST_CLAIM_S:
        yield (
            f"buffer.claim_timeout_s = {timeout_s:g} is not between {SHORTEST_CLAIM_S:g} and "
            f"{LONGEST_CLAIM_S:g}: a worker renews its claims once a second, and one late renewal must not "
            "cost it its tickets"
        )


def _sampling(run: Run) -> Iterator[str]:
    sampling = run.rollout.sampling
    if sampling.temperature == 0:
        yield "rollout.sampling.temperature = 0 draws the same response for a whole group"
    if not sampling.truncated:
        return
    names = "rollout.sampling.top_p, top_k and min_p"
    if not 0 < sampling.top_k <= LARGEST_MASK:
        yield (
            f"{names}: in training rollout.sampling.top_k must be from 1 to {LARGEST_MASK}, as each token is "
            "recorded with all that it was drawn from"
        )
    size = 4 * sampling.top_k * sampling.max_tokens * run.learner.group_size
    if size > LARGEST_MASKS:
        yield (
            f"rollout.sampling.top_k = {sampling.top_k}: a group's record may take {size >> 20} MiB for what "
            f"tokens were drawn from, more than {LARGEST_MASKS >> 20}"
        )
    if run.learner.teacher:
        yield f"{names} must be 1.0, 0 and 0.0: learner.teacher scores the whole distribution"
    if isinstance(run.learner.backend, MegatronBackend) or run.learner.context > 1:
        yield (
            f"{names} must be 1.0, 0 and 0.0: neither Megatron nor learner.backend.context scores a part of "
            "the distribution"
        )


def _advantages(run: Run) -> Iterator[str]:
    cfg, advantage = run.learner, run.learner.advantage
    if isinstance(advantage, Gae) and cfg.critic is None:
        yield "learner.advantage.type = 'gae' needs a critic: learner.critic = {}"
    if cfg.critic and not isinstance(advantage, Gae):
        yield "learner.critic serves learner.advantage.type = 'gae' alone"
    names = run.task.sources if isinstance(run.task, Mix) else {}
    known = f"it has {', '.join(names)}" if names else "task.type is not 'mix'"
    for name in advantage.sources if isinstance(advantage, BySource) else ():
        if name not in names:
            yield f"learner.advantage.sources.{name}: no task of the mixture has that name; {known}"
    if cfg.group_size < cfg.fewest_valid:
        kind = advantage.__struct_config__.tag
        yield f"learner.group_size = 1 gives no response an advantage of type {kind!r}"
    elif cfg.group_size == 1 and cfg.drop_uniform:
        yield "learner.drop_uniform would drop every group of learner.group_size = 1"


def _tasks(run: Run) -> Iterator[str]:
    first, *others = run.tasks.items()
    for place, task in run.tasks.items():
        # A small model knows the characters of its tasks alone, and has no chat template.
        if isinstance(run.model, SmallModel) and isinstance(task, Gsm8k | Math | Choice):
            yield f"{place}.type = {task.__struct_config__.tag!r} needs model.type = 'pretrained'"
        elif isinstance(run.model, SmallModel) and getattr(task, "template", "plain") == "chat":
            yield f"{place}.template = 'chat' needs model.type = 'pretrained'"
        if chat_of(task) is None and getattr(task, "chat", Chat()) != Chat():
            yield f"{place}.chat has no effect without {place}.template = 'chat'"
    for place, task in others:  # a worker has one tokenizer, with one chat template
        if chat_of(task) != chat_of(first[1]):
            yield f"{place}: its template and chat must be those of {first[0]}"
    for name in run.sources:
        if isinstance(run.of(name).task, Python) and run.of(name).reward.path:
            place = run.place(name)
            yield f"reward.path: the reward of {place}.type = 'python' is in {place}.path"


def _verifiers(run: Run) -> Iterator[str]:
    """The environment of verifiers knows no tasks but its own, and nothing else rewards these. Its `renderers`
    write conversations, with system messages of the taskset. The date is the run's beginning."""
    played = isinstance(run.rollout.environment, VerifiersEnvironment)
    for place, task in run.tasks.items():
        if isinstance(task, VerifiersTask) != played or (played and place != "task"):
            yield (
                f"{place}.type = {task.__struct_config__.tag!r}: task.type and rollout.environment.type are "
                "both 'verifiers', or neither is; it is no part of a mixture or of eval.sets"
            )
    chat = run.task.chat if isinstance(run.task, VerifiersTask) else Chat()
    for name in Chat.__struct_fields__:
        if name != "date" and getattr(chat, name) != getattr(Chat(), name):
            yield (
                f"task.chat.{name} has no effect with task.type = 'verifiers', which writes conversations by "
                "task.renderer, with the taskset's system messages"
            )


def _evaluation_sets(run: Run) -> Iterator[str]:
    slots = getattr(run.rollout.engine, "slots", math.inf)
    if not isinstance(run.rollout.environment, SingleTurn):  # else each response is drawn by itself
        slots = math.inf
    for name, one in run.eval.sets.items():
        place = f"eval.sets.{name}"
        if isinstance(run.task, Mix) and name in run.task.sources:
            yield f"{place}: a task of the mixture has that name, and accuracies under it"
        if one.path is not None and not hasattr(one.task or run.task, "path"):
            yield f"{place}.path: the task reads no file; name one that does by {place}.task.type"
        if (one.samples or 0) > slots:
            yield f"{place}.samples = {one.samples} is above rollout.engine.slots = {slots}"
        if not (one.samples or one.preset) and (one.temperature or one.top_p):
            yield f"{place}.temperature and top_p are of samples: {place}.samples = 1 or more"


def _best_version(run: Run) -> Iterator[str]:
    best, sets = run.eval.best, run.eval.sets
    if not best and run.eval.patience:
        yield "eval.patience needs eval.best, the metric to watch"
    names = ["", *(run.task.sources if isinstance(run.task, Mix) else ()), *sets]
    known = ["/".join(filter(None, ("eval", name, "accuracy"))) for name in names]
    passes = re.fullmatch(r"eval/(.+)/pass_at_\d+", best)
    if best and best not in known and not (passes and passes[1] in sets):
        yield f"eval.best = {best!r}: it is one of {', '.join(known)}, or eval/SET/pass_at_K"


def _curriculum(run: Run) -> Iterator[str]:
    order = run.learner.order
    if not isinstance(order, PassRate):
        return
    if order.keep[0] > order.keep[1]:
        yield f"learner.order.keep = {list(order.keep)} holds nothing: the smaller one comes first"
    if not (order.medium or order.new or order.hard or order.easy):
        yield "learner.order: medium, new, hard and easy are all 0, so no problem is asked"


def _lengths(run: Run) -> Iterator[str]:
    model, rollout, overlong = run.model, run.rollout, run.reward.overlong
    tokens, longest = rollout.tokens_after_prompt, rollout.sampling.max_tokens
    if isinstance(model, SmallModel) and longest >= model.max_positions:
        yield "rollout.sampling.max_tokens leaves no room in model.max_positions"
    elif isinstance(model, SmallModel) and tokens >= model.max_positions:
        yield "rollout.environment's results leave no room in model.max_positions"
    # A pretrained model may have room for still less, which is said where its shape is known.
    if isinstance(model, SmallModel) and tokens >= run.learner.pass_tokens:
        yield (
            f"{run.learner.pass_limit} has no room for a prompt and the {tokens} tokens that may "
            "follow it"
        )
    if overlong is None:
        return
    unpunished = overlong.max_tokens - overlong.cache_tokens
    if unpunished <= 0:
        yield (
            f"reward.overlong.cache_tokens = {overlong.cache_tokens} is not below max_tokens = "
            f"{overlong.max_tokens}: every response would be punished"
        )
    elif unpunished >= longest:
        yield (
            f"reward.overlong punishes beyond {unpunished} tokens, which no response of "
            f"rollout.sampling.max_tokens = {longest} has"
        )


def _processes(run: Run) -> Iterator[str]:
    processes, device = run.learner.processes, run.learner.device
    if processes > 1 and ":" in device:
        yield f"learner.device = {device!r}: learner.processes = {processes} take GPUs from 0 on: 'cuda'"


def _engine(run: Run) -> Iterator[str]:
    rollout, size = run.rollout, run.learner.group_size
    engine, cache = rollout.engine, getattr(rollout.engine, "kv_cache", "auto")
    slots = math.inf if isinstance(engine, ScriptedEngine) else engine.slots
    if isinstance(rollout.environment, SingleTurn) and slots < size:
        yield f"rollout.engine.slots = {slots} has no room for a group of learner.group_size = {size}"
    if isinstance(engine, SglangEngine) and engine.url and rollout.workers > 1:
        yield "rollout.engine.url: a server takes weights from one worker: rollout.workers = 1"
    if rollout.kv_scales and cache != "fp8":
        yield "rollout.kv_scales needs rollout.engine.kv_cache = 'fp8'"
    if not isinstance(engine, VllmEngine):
        return
    temperatures = {"rollout.sampling": rollout.sampling.temperature}
    temperatures |= {
        f"eval.sets.{name}": one.temperature or 0 for name, one in run.eval.sets.items()
    }
    for place, temperature in temperatures.items():
        if not vllm_draws(temperature):
            yield f"{place}.temperature = {temperature}: vLLM takes 0, or 0.01 to 2"
    if engine.dtype == "float32" and rollout.format in ("int4", "int4-g32"):
        yield (
            f"rollout.engine.dtype = 'float32' with rollout.format = {rollout.format!r}: vLLM's INT4 product "
            "takes bfloat16"
        )
    if cache == "fp8" and engine.kv_on_update == "keep":
        yield "rollout.engine.kv_cache = 'fp8' needs kv_on_update = 'recompute': scales change"
    elif cache == "fp8" and engine.compiled:
        yield "rollout.engine.kv_cache = 'fp8' needs compiled = false: its scales are observed"


def _lora(run: Run) -> Iterator[str]:
    lora, kl = run.learner.lora, run.learner.reference_kl
    if lora is None:
        return
    if run.learner.precision != "full":
        yield "learner.lora runs on the rollouts' numbers already: learner.precision must be 'full'"
    if refused := no_adapters(run.rollout.engine, run.rollout.format, lora.rank):
        yield refused
    if kl and (kl.path or kl.reset_every):
        yield "learner.reference_kl: with learner.lora the reference is its base: no path, no reset_every"


def _small_model(run: Run) -> Iterator[str]:
    model, learner, format = run.model, run.learner, run.rollout.format
    if not isinstance(model, SmallModel):
        return
    if model.experts == 0 and (learner.routing_replay or learner.router_aux_coef):
        yield "learner.routing_replay and router_aux_coef need model.experts above 0"
    if 0 < model.experts < model.experts_per_token:
        yield f"model.experts_per_token = {model.experts_per_token} of {model.experts} experts"
    if model.width % (2 * model.heads):  # RoPE turns pairs
        yield f"model.width = {model.width} is not an even number for each of model.heads = {model.heads}"
    elif model.heads % model.kv_heads:
        yield f"model.heads = {model.heads} is not a multiple of model.kv_heads = {model.kv_heads}"
    if format in ("nvfp4", "mxfp4") and model.mlp % 2:  # two weights to a byte
        yield f"rollout.format = {format!r} needs an even model.mlp, not {model.mlp}"


def _published_weights(run: Run) -> Iterator[str]:
    rollout, cfg = run.rollout, run.learner
    if cfg.precision == "jet" and rollout.format != "fp8":
        yield f"learner.precision = 'jet' needs rollout.format = 'fp8', not {rollout.format!r}"
    if (
        rollout.sticky_scales and cfg.precision != "full"
    ):  # the learner's forward measures ranges anew
        yield "rollout.sticky_scales must be 0 where learner.precision is not 'full'"
    elif rollout.sticky_scales and (cfg.lora or rollout.format == "bf16"):
        why = "learner.lora's base does not change" if cfg.lora else "bf16 has no scales"
        yield f"rollout.sticky_scales = {rollout.sticky_scales:g} does nothing: {why}; leave it 0"
    if rollout.smooths is None:
        return
    formats = ROUNDS_ACTIVATIONS + WEIGHT_SCALES
    qarl = cfg.precision == "qarl" and isinstance(cfg.backend, MegatronBackend)
    unaware = {
        "learner.lora": cfg.lora is not None,
        "learner.precision = 'jet'": cfg.precision == "jet",
        "learner.precision = 'qarl' of the Megatron backend": qarl,
    }
    if rollout.format not in formats:
        yield f"rollout.smoothing: not with {rollout.format}, only with {', '.join(formats)}"
    for name in (name for name, on in unaware.items() if on and rollout.format in formats):
        yield f"rollout.smoothing: not with {name}, whose forward pass knows no scales by channel"


def _scores(run: Run) -> Iterator[str]:
    cfg = run.learner
    if cfg.proximal != "exact" and not cfg.update_scores_itself:
        yield (
            "learner.proximal = 'loglinear' leaves out scores before the update, which GAE, a critic, a KL in "
            "the reward, router_aux_coef, kept_tokens and the Megatron backend need"
        )
    if cfg.teacher is None:
        return
    # What draws or weighs groups by rewards alone knows nothing of what a teacher has to say.
    if cfg.drop_uniform:
        yield "learner.drop_uniform would drop groups from which learner.teacher has something to teach"
    if isinstance(run.buffer.sampler, Prioritized):
        yield "buffer.sampler.type = 'prioritized' has no weights for the advantages of learner.teacher"
    if isinstance(cfg.teacher, ServerTeacher) and run.rollout.sampling.temperature != 1:
        yield (
            "learner.teacher.type = 'server' gives log-probs at temperature 1: "
            "rollout.sampling.temperature must be 1.0"
        )


def _addresses(run: Run) -> Iterator[str]:
    first = int(str(run.rollout.serve or 0).rpartition(":")[2])  # 0 is any
    last = first + max(
        0, run.rollout.workers - 1
    )  # each worker takes the port after the last one's
    if first and last > _LAST_PORT:
        yield f"rollout.serve: there is no port {last}"
    endpoints = (run.broadcast.announce, run.broadcast.fetch)
    everywhere = any((endpoint or "").startswith(_WILDCARDS) for endpoint in endpoints)
    if run.broadcast.host is None and everywhere:
        yield "broadcast.host is needed: workers cannot connect to every interface"
    # config.toml would keep a password, and every tracker that shows the settings.
    for label, tracker in labelled(run.trackers).items():
        uri = tracker.uri or "" if isinstance(tracker, Mlflow) else ""
        if re.search(r"//[^/@]*:[^/@]+@", uri):
            yield (
                f"trackers: the uri of {label} holds a password: MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD have it, or all of the uri is in MLFLOW_TRACKING_URI"
            )


RULES: tuple[Callable[[Run], Iterator[str]], ...] = (
    _groups, _sampling, _advantages, _tasks, _verifiers, _evaluation_sets, _best_version, _curriculum, _lengths,
    _processes, _engine, _lora, _small_model, _published_weights, _scores, _addresses,
)  # fmt: skip


def broken_rules(run: Run) -> list[str]:
    """Returns all that is wrong with `run`."""
    return [fault for rule in RULES for fault in rule(run)]
