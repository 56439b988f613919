"""What is wrong with a table of settings, in words: the dotted path, what was given, what could be.

Object contains unknown field `max_lagg` - at `$.learner`
    → learner.max_lagg: no such setting; did you mean learner.max_lag?
Invalid enum value 'int7' - at `$.rollout.format`
    → rollout.format = 'int7': no such choice; did you mean 'int8'? It is one of bf16, fp8, …
"""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

import msgspec
from msgspec.inspect import StructType, Type, UnionType

from areal_q.config.run import Run
from areal_q.decode_errors import (
    choices,
    expectation,
    joined,
    not_among,
    parted,
    quoted,
    types_at,
    value_at,
)

Table = dict[str, Any]
KEYS = "the keys of "
PATTERNS = {
    "name": "letters, digits and . _ - after a letter or digit",
    "rollout.serve": "PORT or HOST:PORT",
}
"""What the texts of settings with a pattern consist of."""


_SETS = "; each set is a table of its own, [eval.sets.NAME] (docs/data.md)"
_INSTEAD_OF_LISTS = {
    "eval": _SETS,
    "eval.sets": _SETS,
    "task": '; several are type = "mix" with a table for each, [task.sources.NAME] (docs/data.md)',
}
"""What is written where other programs have a list of tables"""
_TRACKERS = 'trackers = [{type = "wandb", project = "NAME"}]'
_PASSES = "steps, each of learner.groups problems"
_MEMORY = "learner.microbatch_tokens, which bounds memory and changes no result"
OURS = {
    "learning_rate": "learner.optimizer.lr",
    "actor_learning_rate": "learner.optimizer.lr",
    "lr": "learner.optimizer.lr",
    "num_generations": "learner.group_size",
    "n_samples_per_prompt": "learner.group_size",
    "rollouts_per_example": "learner.group_size",
    "n": "learner.group_size",
    "batch_size": "learner.groups, the problems of a step",
    "train_batch_size": "learner.groups, the problems of a step",
    "rollout_batch_size": "learner.groups, the problems of a step",
    "ppo_mini_batch_size": "learner.minibatches, the updates of a step",
    "per_device_train_batch_size": f"learner.groups, the problems of a step, and {_MEMORY}",
    "micro_train_batch_size": _MEMORY,
    "ppo_micro_batch_size_per_gpu": _MEMORY,
    "gradient_accumulation_steps": _MEMORY,
    "num_iterations": "learner.epochs",
    "ppo_epochs": "learner.epochs",
    "num_train_epochs": _PASSES,
    "total_epochs": _PASSES,
    "max_steps": "steps",
    "total_training_steps": "steps",
    "max_async_level": "learner.max_lag",
    "async_level": "learner.max_lag",
    "oversampling_factor": "learner.oversampling",
    "gen_batch_size": "learner.oversampling, over learner.groups",
    "max_completion_length": "rollout.sampling.max_tokens",
    "max_response_length": "rollout.sampling.max_tokens",
    "generate_max_len": "rollout.sampling.max_tokens",
    "max_new_tokens": "rollout.sampling.max_tokens",
    "max_prompt_length": "none, as prompts are never cut; areal-q check names one that is too long",
    "temperature": "rollout.sampling.temperature",
    "beta": "learner.reference_kl.coef, without which there is no reference model",
    "kl_coef": "learner.reference_kl.coef, without which there is no reference model",
    "kl_loss_coef": "learner.reference_kl.coef, without which there is no reference model",
    "init_kl_coef": "learner.reference_kl.coef, without which there is no reference model",
    "loss_type": "learner.objective.type, and learner.aggregation.type for the mean over tokens",
    "epsilon": "learner.objective.clip_low and learner.objective.clip_high",
    "epsilon_high": "learner.objective.clip_high",
    "clip": "learner.objective.clip_low and learner.objective.clip_high",
    "clip_ratio": "learner.objective.clip_low and learner.objective.clip_high",
    "adv_estimator": "learner.advantage.type",
    "advantage_estimator": "learner.advantage.type",
    "scale_rewards": "learner.advantage.type, dr_grpo for false",
    "entropy_coeff": "learner.entropy_coef",
    "gradient_checkpointing": "learner.recompute",
    "quantization": "rollout.format",
    "load_in_4bit": "rollout.format, such as int4",
    "use_vllm": "rollout.engine.type = 'vllm'",
    "gpu_memory_utilization": "rollout.engine.kv_cache_bytes of vLLM",
    "tensor_parallel_size": "rollout.engine.tensor_parallel of vLLM and SGLang",
    "tensor_model_parallel_size": "rollout.engine.tensor_parallel of vLLM and SGLang",
    "model_name_or_path": "model.type = 'pretrained' and model.path",
    "dataset": "task.type and task.path",
    "dataset_name": "task.type and task.path",
    "train_files": "task.type and task.path",
    "val_files": "task.heldout, a share of the data or a file, and eval.sets",
    "reward_funcs": "reward.path",
    "eval_steps": "eval.every",
    "save_steps": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "output_dir": "root and name",
    "report_to": _TRACKERS,
    "wandb": _TRACKERS,
}
"""The places here of settings of TRL, verl, OpenRLHF and prime-rl, by the last part of their names"""


def fault(error: msgspec.ValidationError, table: Table) -> str:
    """One sentence for what `error` says of `table`, which was to become a Run."""
    what, path = parted(error)
    path = _with_name(path, error, table)
    if name := quoted(what, "Object contains unknown field"):
        return _unknown(joined(path, name), table)
    if name := quoted(what, "Object missing required field"):
        if name == "type":
            one_of = ", ".join(choices(Run, joined(path, name), table))
            return f"{joined(path, name)} is missing: it is one of {one_of}"
        struct = _struct(path, table)
        tag = f"{path}.type = {struct.tag!r}" if struct and struct.tag else path
        return f"{joined(path, name)} is missing: {tag} needs it"
    given = f"{path} = {value_at(table, path)!r}"
    if what.startswith("Invalid") or path.rpartition(".")[2] == "type":
        return f"{given}: {_no_choice(path, table)}"
    if "matching regex" in what and path in PATTERNS:
        return f"{given}: must be {PATTERNS[path]}"
    if path.startswith(KEYS):
        names = ", ".join(value_at(table, path.removeprefix(KEYS)))
        return f"{path}, {names}: letters, digits, _ and - after a letter or digit, 64 at most"
    instead = _INSTEAD_OF_LISTS.get(path, "") if "got `array`" in what else ""
    if "`object" in what and not isinstance(value_at(table, path), list | dict):
        instead = _in_the_table(path, table)
    return f"{given}: {expectation(what)}{instead}"


def _no_choice(path: str, table: Table) -> str:
    """Returns why the choice at `path` is none: it may be one of another setting of the learner."""
    given = str(value_at(table, path))
    for other in ("learner.advantage", "learner.objective", "learner.aggregation"):
        if not path.startswith(other) and given in choices(Run, f"{other}.type", table):
            return (
                f"it is chosen by {other}.type = {given!r}, beside any {path.removesuffix('.type')}"
            )
    return not_among(given, choices(Run, path, table)) + _of_ones_own(path)


def _in_the_table(path: str, table: Table) -> str:
    """Returns what to write instead of one value for a whole table: a choice, or a file."""
    value, structs = value_at(table, path), _structs(path, table)
    tags = [str(s.tag) for s in structs if s.tag]
    with_path = (s for s in structs if any(field.name == "path" for field in s.fields))
    if value in tags:
        return f"; write {path}.type = {value!r}"
    if isinstance(value, str) and {*"./"} & {*value} and (struct := next(with_path, None)):
        kind = f"{path}.type = {struct.tag!r} and " if struct.tag else ""
        return f"; write {kind}{path}.path = {value!r}"
    if tags:
        return f"; {path}.type is one of {', '.join(tags)}"
    return f"; it has {', '.join(field.name for s in structs[:1] for field in s.fields)}"


def _with_name(path: str, error: msgspec.ValidationError, table: Table) -> str:
    """Returns `path` with the name of the entry at fault where msgspec says `[...]`: the first that gives the
    same error when all entries are as it is."""
    parent, several, rest = path.partition("[...]")
    entries = value_at(table, parent) if several else {}
    for name, entry in entries.items():
        alike = _put(table, parent.split("."), dict.fromkeys(entries, entry))
        try:
            msgspec.convert(alike, Run)
        except msgspec.ValidationError as found:
            if parted(found) == parted(error):
                return f"{parent}.{name}{rest}"
    return path


def _put(table: Table, keys: list[str], value: Any) -> Table:
    first, *rest = keys
    return {**table, first: _put(table[first], rest, value) if rest else value}


def _unknown(path: str, table: Table) -> str:
    parent, _, name = path.rpartition(".")
    if tags := [s.tag for s in _structs(parent, table) if any(f.name == name for f in s.fields)]:
        which = " or ".join(map(repr, tags))
        return f"{path}: no such setting; did you mean {parent}.type = {which}, which has it?"
    struct = _struct(parent, table)
    own = [field.name for field in struct.fields] if struct else []
    if here := _ours(path, value_at(table, path), own):
        return here
    beside = [joined(parent, name) for name in own]
    if near := get_close_matches(path, beside, n=1, cutoff=0.7):
        return f"{path}: no such setting; did you mean {near[0]}?{_of_ones_own(path)}"
    if others := _elsewhere(name):
        return f"{path}: no such setting; did you mean {' or '.join(others[:3])}?"
    where = f"{parent} has" if parent else "there are"
    names = ", ".join(name.rpartition(".")[2] for name in beside)
    listed = f"{where} {names} (areal-q settings lists all)"
    return f"{path}: no such setting; {listed}{_of_ones_own(path)}"


def _ours(path: str, value: Any, own: Sequence[str] = ()) -> str:
    """Returns a sentence on what a setting of another program is called here, beside it if the table has it
    among its `own` names; it may be anywhere in a table that only the other has. Empty if it is of none."""
    parent, _, name = path.rpartition(".")
    if name in OURS:
        leaf = OURS[name].rpartition(".")[2]
        return f"{path}: no such setting; here it is {joined(parent, leaf) if leaf in own else OURS[name]}"
    below = value if isinstance(value, dict) else {}
    return next(filter(None, (_ours(f"{path}.{key}", below[key]) for key in below)), "")


def _of_ones_own(path: str) -> str:
    """Returns how to have one's own, for a loss or an advantage."""
    asked = path.rpartition(".")[0] in ("learner.objective", "learner.advantage")
    return f"; of your own: {path.rpartition('.')[0]}.path=FILE" if asked else ""


def _elsewhere(name: str) -> list[str]:
    """Returns the settings, in any place, whose names are nearest to `name`."""
    leaves = [path.rpartition(".")[2] for path in _all_paths()]
    near = get_close_matches(name, leaves, n=1, cutoff=0.8)
    return [path for path, leaf in zip(_all_paths(), leaves, strict=True) if leaf in near]


def _struct(path: str, table: Table) -> StructType | None:
    """Returns the settings at `path`, by the choice (`type = …`) that `table` makes."""
    value = value_at(table, path)
    tag = value.get("type") if isinstance(value, dict) else None
    return next((s for s in _structs(path, table) if s.tag in (None, tag)), None)


def _structs(path: str, table: Table) -> list[StructType]:
    return [one for one in types_at(Run, path, table) if isinstance(one, StructType)]


@cache
def _all_paths() -> list[str]:
    """Every setting of every choice."""
    return sorted(set(_paths(msgspec.inspect.type_info(Run), "")))


def _paths(kind: Type, prefix: str) -> Iterator[str]:
    for struct in kind.types if isinstance(kind, UnionType) else (kind,):
        for field in struct.fields if isinstance(struct, StructType) else ():
            yield prefix + field.name
            yield from _paths(field.type, f"{prefix}{field.name}.")
