"""Settings = defaults ← TOML file ← `a.b=c` overrides: merged as tables, converted once."""

import datetime
import hashlib
import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_q.config.engines import HfEngine, TorchEngine
from areal_q.config.faults import fault
from areal_q.config.learner import LearnerConfig, Rate
from areal_q.config.rules import broken_rules
from areal_q.config.run import HfModel, PretrainedModel, Run
from areal_q.decode_errors import suggestion
from areal_q.errors import ConfigError, SettingsError

Table = dict[str, Any]
Override = str | tuple[str, Any]
"""A setting on top of others: "a.b=1.5", or ("a.b", 1.5)"""
COMMAND_LINE = "on the command line"
OWN_BY_PATH = re.compile(
    r"learner\.(objective|order|advantage(\.otherwise|\.sources\.[^.]+)?)|buffer\.sampler|rollout\.environment"
)
"""Tables in which only `type = "python"` has a path, so that to set it chooses that type. The digest of the
file that was named before goes, too."""
FILES = ("path", "heldout", "template_file")
"""The last parts of the settings that name files"""
_PACKAGE = Path(__file__).resolve().parents[1]
TEMPLATES = "templates"
"""Folder of the shipped configurations in which those of `areal-q init` are, whose names are not offered."""


def load(path: str | Path | None = None, overrides: Sequence[Override] | None = None) -> Run:
    """Returns the settings of a run, from a file or a configuration that comes with the program, by its name.
    Raises ConfigError with the file or dotted path at fault."""
    if path is None:
        return parse("", "settings", overrides)
    file = find(Path(path))
    try:
        text = file.read_text("utf-8-sig")  # a BOM is what editors on Windows write
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error}") from error
    run = parse(text, str(path), overrides)
    _check_place(file, msgspec.to_builtins(run))
    return run


def _check_place(file: Path, table: Table, prefix: str = "") -> None:
    """Raises ConfigError for a file that the settings in `file` name, and that is beside it instead of in the
    present directory, from which names are looked up."""
    for key, value in table.items():
        if isinstance(value, dict):
            _check_place(file, value, f"{prefix}{key}.")
        if key not in FILES or not isinstance(value, str) or not value:
            continue
        # os.path's, since a directory may be closed to us, and a text too long for a name.
        name = value if os.path.exists(value) else value.partition(":")[0]
        if not os.path.exists(name) and os.path.exists(file.parent / name):
            raise ConfigError(
                f"{file}: {prefix}{key} = {value!r} is looked for in the present directory, {Path.cwd()}, and "
                f"is beside the settings: cd {file.parent} first, or write the whole path"
            )


def parse(toml: str, source: str, overrides: Sequence[Override] | None = None) -> Run:
    """Like `load`, from the text of a file; `source` names it in errors."""
    try:
        table = tomllib.loads(toml)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: {error}") from error
    return _overridden(table, source, overrides or [])


def override(run: Run, *overrides: Override) -> Run:
    """Returns `run` with `a.b=c` settings replaced, checked like a file."""
    return _overridden(msgspec.to_builtins(run), "settings", overrides)


def as_before(run: Run, before: Run) -> Run:
    """Returns `run` with what `before`, its settings when it started, had in place of `auto` and of other
    settings that are filled in as a run starts, and with the digests of its own code."""
    run = _of_the_same_commits(run, before)
    foreign = type(run.model) is PretrainedModel and isinstance(before.model, HfModel)
    run = with_transformers(run, foreign)
    learner, rollout = run.learner, run.rollout
    for name in ("objective", "advantage", "order"):
        own, known = getattr(learner, name), getattr(before.learner, name)
        if getattr(own, "digest", None) == "" and getattr(known, "digest", ""):
            own = msgspec.structs.replace(own, digest=known.digest)
            learner = msgspec.structs.replace(learner, **{name: own})
    if learner.dtype == "auto":
        learner = msgspec.structs.replace(learner, dtype=before.learner.dtype)
    learner = with_rates(learner, before.learner.rates)
    if rollout.unquantized == "auto":
        rollout = msgspec.structs.replace(rollout, unquantized=before.rollout.unquantized)
    if rollout.smoothing == "auto":
        rollout = msgspec.structs.replace(rollout, smoothing=before.rollout.smoothing)
    known = before.rollout.aqn
    if rollout.aqn and known and rollout.aqn.steps == run.steps:
        aqn = msgspec.structs.replace(rollout.aqn, steps=known.steps)
        rollout = msgspec.structs.replace(rollout, aqn=aqn)
    return msgspec.structs.replace(run, learner=learner, rollout=rollout)


def with_rates(learner: LearnerConfig, rates: tuple[Rate, Rate]) -> LearnerConfig:
    """Returns the settings with `rates`, the policy's and a critic's, in place of those that are `auto`."""
    rate, critics = rates
    if learner.optimizer.lr == "auto":
        optimizer = msgspec.structs.replace(learner.optimizer, lr=rate)
        learner = msgspec.structs.replace(learner, optimizer=optimizer)
    if learner.critic and learner.critic.optimizer.lr == "auto":
        optimizer = msgspec.structs.replace(learner.critic.optimizer, lr=critics)
        critic = msgspec.structs.replace(learner.critic, optimizer=optimizer)
        learner = msgspec.structs.replace(learner, critic=critic)
    return learner


def with_transformers(run: Run, foreign: bool) -> Run:
    """Returns `run` with transformers' decoder in place of ours if its model is `foreign`, and with the engine
    of type hf in place of torch's where transformers has the model."""
    if foreign and isinstance(run.model, PretrainedModel):
        run = msgspec.structs.replace(run, model=HfModel(path=run.model.path))
    engine = run.rollout.engine
    if isinstance(run.model, HfModel) and type(engine) is TorchEngine:
        engine = HfEngine(**msgspec.structs.asdict(engine))
        run = msgspec.structs.replace(
            run, rollout=msgspec.structs.replace(run.rollout, engine=engine)
        )
    return run


def _of_the_same_commits(run: Run, before: Run) -> Run:
    """Returns `run` with the directories of `before` in the Hub's cache in place of the ids of the same models,
    where these name no revision: there may be a newer one by now."""

    def same(own: Any, known: Any) -> Any:
        id, path = (getattr(one, "path", None) or "" for one in (own, known))
        cached = f"/models--{id.replace('/', '--')}/snapshots/" in path
        return msgspec.structs.replace(own, path=path) if id and cached else own

    parts = ("reference_kl", "teacher")
    kept = {name: same(getattr(run.learner, name), getattr(before.learner, name)) for name in parts}
    learner = msgspec.structs.replace(run.learner, **kept)
    return msgspec.structs.replace(run, model=same(run.model, before.model), learner=learner)


def _overridden(table: Table, source: str, overrides: Sequence[Override]) -> Run:
    """Raises SettingsError with a line for each fault; those that `table` does not have are the command
    line's."""
    together = table
    for setting in overrides:
        together = merge(together, nested(*pair_of(setting)))
    run = _convert(together)
    if isinstance(run, Run):
        return run
    own = _convert(table) if overrides else run
    typed = any(isinstance(setting, str) for setting in overrides)
    over = COMMAND_LINE if typed else "settings"
    places = (source if isinstance(own, list) and it in own else over for it in run)
    raise SettingsError("\n".join(f"{place}: {it}" for place, it in zip(places, run, strict=True)))


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


def _convert(table: Table) -> Run | list[str]:
    """Returns the run that `table` describes, or all that is wrong with it."""
    table = merge(msgspec.to_builtins(Run()), table)
    try:
        run = msgspec.convert(table, Run)
    except msgspec.ValidationError as error:
        return [fault(error, table)]
    aqn = run.rollout.aqn
    if aqn is not None and not aqn.steps:
        # `steps` may change when a run resumes, and the noise that was published before must stay what it was.
        aqn = msgspec.structs.replace(aqn, steps=run.steps)
        rollout = msgspec.structs.replace(run.rollout, aqn=aqn)
        run = msgspec.structs.replace(run, rollout=rollout)
    return broken_rules(run) or run


def parsed(text: str) -> tuple[str, Any]:
    """Returns `a.b=1.5` as ("a.b", 1.5). The value is TOML; a bare word is a string."""
    path, sep, raw = text.partition("=")
    if not sep or not path.strip():
        raise ConfigError(f"{COMMAND_LINE}: {text!r} is no setting: write a.b=value")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    return path, value


def pair_of(setting: Override) -> tuple[str, Any]:
    """Returns a setting as a pair of its dotted name and its value."""
    path, value = parsed(setting) if isinstance(setting, str) else setting
    return path.strip(), value


def in_words(settings: Sequence[Override]) -> str:
    """Returns settings as they are shown: those of a command line as they were typed."""
    return ", ".join(s if isinstance(s, str) else f"{s[0]}={s[1]!r}" for s in settings)


def nested(path: str, value: Any) -> Table:
    """Returns ("a.b", 1.5) as {"a": {"b": 1.5}}."""
    table: Table = {}
    leaf = table
    *parents, last = path.split(".")
    for key in parents:
        leaf = leaf.setdefault(key, {})
    leaf[last] = value
    if last == "path" and OWN_BY_PATH.fullmatch(".".join(parents)):
        leaf |= {"type": "python", "digest": ""}
    return table


def settings_hash(run: Run) -> str:
    """Returns a hash of all settings but the run's name and place: equal hashes are equal settings."""
    table = msgspec.to_builtins(run, order="sorted")
    table = {key: value for key, value in table.items() if key not in ("name", "root")}
    return hashlib.blake2b(msgspec.json.encode(table), digest_size=16).hexdigest()


def workers_hash(run: Run) -> str:
    """Returns a hash of what rollout workers are set up from: settings, among them the digests of a user's own
    code."""
    rollout = msgspec.structs.replace(run.rollout, workers=1, serve=None)
    # A worker follows a learner to other endpoints as it is.
    broadcast = msgspec.structs.replace(run.broadcast, announce=None, fetch=None, host=None)
    learner = (run.learner.max_lag, run.learner.group_size, run.learner.routing_replay)
    scored = [(name, run.of(name).task, run.of(name).reward) for name in run.sources]
    parts = (run.model, scored, rollout, run.buffer, broadcast, learner)
    return hashlib.blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=16).hexdigest()


def dump_toml(run: Run) -> str:
    """Returns the resolved settings as TOML that `load` reads back to an equal Run.

    None cannot be written in TOML and is left out; every optional setting defaults to it.
    """
    import tomli_w

    def drop_none(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: drop_none(v) for k, v in value.items() if v is not None}
        return value

    own = (datetime.datetime, datetime.date, datetime.time)  # TOML has them, too
    return tomli_w.dumps(drop_none(msgspec.to_builtins(run, builtin_types=own)))


def find(path: Path) -> Path:
    """Returns `path`, or the shipped configuration that is meant by it. Raises ConfigError with their names.

    Example: `quickstart` and `configs/quickstart.toml` are the same, unless files of these names are there.
    """
    if path.exists():
        return path
    if path.name == "config.toml":
        raise ConfigError(f"{path.parent}: there is no run: it has no config.toml")
    name, names = path.as_posix().removeprefix("configs/").removesuffix(".toml"), shipped_names()
    if name in names:
        return shipped() / f"{name}.toml"
    near = suggestion(name, names)
    raise ConfigError(
        f"{path}: no such file; {f'{near} ' if near else ''}Configurations that come with areal-q, by "
        f"name: {', '.join(names)} (in {shipped()})"
    )


def shipped() -> Path:
    """Returns the directory of the configurations that come with the program, and are found by name: in the
    package, where a wheel has them, or beside it in a clone."""
    packaged = _PACKAGE / "configs"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "configs"


def shipped_names() -> list[str]:
    """Returns names such as `quickstart` and `papers/qurl-gsm8k`."""
    files = (path.relative_to(shipped()) for path in shipped().rglob("*.toml"))
    return sorted(f.with_suffix("").as_posix() for f in files if f.parts[0] != TEMPLATES)
