"""Validation of problems and incoming groups against the model and the run."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import msgspec
import xxhash

from areal_q.config import LearnerConfig, Mix, ModelConfig, Python, Sft, SmallModel, TaskConfig
from areal_q.errors import ConfigError, RecordError, TaskError
from areal_q.messages import Array, Group
from areal_q.models import DecoderConfig
from areal_q.system.files import write_whole
from areal_q.tasks import Task, Tokenizer
from areal_q.tasks.encoding.hf_tokenizer import vocabulary_files
from areal_q.tasks.lazy import Lazy
from areal_q.tasks.ordering.mixture import parts_of

DATA_DIGEST = "problems-digest"
"""Name of the file in a run's directory with the digest of the problems that the run began with, and how many
of them leave room for a response; and below with digests of what makes ids of them, each after its name and a
colon."""


def fits(config: DecoderConfig, learner: LearnerConfig) -> Callable[[Group], None]:
    """Returns a check that raises RecordError for a group that does not fit a model of this `config`, or this
    learner: a token or route is out of range, or a prompt and its response have too many tokens."""
    most = min(learner.pass_tokens, config.max_positions)
    experts, layers = config.experts, len(config.sparse_layers)

    def check(group: Group) -> None:
        where = f"group of ticket {group.ticket.number}"
        ids = group.ticket.prompt_ids.numpy()
        if ids.min() < 0 or ids.max() >= config.vocab_size:
            raise RecordError(f"{where}: a token of the prompt outside of {config.vocab_size}")
        prompt = len(ids)
        for t in group.trajectories:
            branches = (b.at + b.response_ids.shape[0] for b in t.branches)
            if (tokens := max(prompt + t.num_tokens, *branches, 0)) > most:
                raise RecordError(
                    f"{where}, trajectory {t.index}: {tokens} tokens with the prompt, more than "
                    f"the {most} that {learner.pass_limit} and the model's positions leave"
                )
            for routes in (path.routes for path in (t, *t.branches) if path.routes):
                if not experts or routes.shape[1:] != (layers, experts.per_token):
                    raise RecordError(
                        f"{where}, trajectory {t.index}: routes {list(routes.shape)} of another model"
                    )
                if routes.numpy().max() >= experts.count:
                    raise RecordError(
                        f"{where}, trajectory {t.index}: routes to more than {experts.count} experts"
                    )
        paths = [(t.index, path) for t in group.trajectories for path in (t, *t.branches)]
        drawn = [(i, ids) for i, p in paths for ids in (p.response_ids, p.sampling_mask) if ids]
        if Array.concatenate([ids for _, ids in drawn]).max() >= config.vocab_size:
            first = next(i for i, ids in drawn if ids.numpy().max() >= config.vocab_size)
            raise RecordError(
                f"{where}, trajectory {first}: a token outside of {config.vocab_size}"
            )

    return check


def check_data(directory: Path, cfg: TaskConfig | Sft, task: Task) -> None:
    """Records in the run's `directory` a digest of the problems that the run began with. Raises TaskError if
    they have changed: ticket numbers would stand for other problems, and accuracies could not be compared.

    The digest of a data set from the Hub is of the problems themselves, because its name is the same for later
    revisions, and the fingerprint of `datasets` depends on the version of that library.
    """
    parts = [one.task for one in cfg.sources.values()] if isinstance(cfg, Mix) else [cfg]
    paths = [path for part in parts if (path := getattr(part, "path", None)) is not None]
    if not paths:
        return  # problems are made from the settings
    path = ", ".join(paths)
    another = isinstance(getattr(cfg, "heldout", None), str)
    local = Path(path).is_file() and not isinstance(cfg, Python | Mix) and not another
    found = _digest_of(Path(path), None if local else task)
    record = directory / DATA_DIGEST
    known, encoding = _recorded(record)
    if not known:
        _record(record, [found], encoding)
    elif known[0] != found:
        raise TaskError(
            f"{path}: its problems are not those that the run began with; put the data of that time back, "
            f"or remove {record} to go on with these"
        )


def check_kept(directory: Path, kept: Task) -> None:
    """Records beside that digest how many problems leave room for a response. Raises ConfigError if there were
    more or fewer as the run began, since a ticket's number would stand for another problem."""
    record = directory / DATA_DIGEST
    known, encoding = _recorded(record)
    count = str(len(kept.train) + len(kept.heldout))
    if len(known) == 1:
        _record(record, [*known, count], encoding)
    elif known and known[1] != count:
        raise ConfigError(
            f"{count} problems leave room for a response, and {known[1]} did as the run began: put "
            "learner.microbatch_tokens, learner.backend.context and rollout.engine back, which decide that"
        )


def check_encoding(directory: Path, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Records in the same file digests of what makes ids of texts, and ends responses. Raises ConfigError if
    one of them has changed: what was learnt, and the logs, stand for other text then. A run that began before
    they were recorded goes on with what there is."""
    if isinstance(model, SmallModel):
        return  # whose tokenizer is part of this program
    files = b"".join(file.read_bytes() for file in vocabulary_files(model.path))
    made = {
        "tokenizer": files,
        "chat template": tokenizer.template.encode(),
        "ends of a response": msgspec.json.encode(sorted(tokenizer.stops)),
        "special tokens": msgspec.json.encode(sorted(tokenizer.special_ids)),
    }
    found = {name: xxhash.xxh3_128_hexdigest(content) for name, content in made.items()}
    record = directory / DATA_DIGEST
    problems, known = _recorded(record)
    if changed := [name for name in found if known.get(name, found[name]) != found[name]]:
        raise ConfigError(
            f"not what the run began with, by the files in {model.path}, task.chat or the release of "
            f"transformers: {', '.join(changed)}; put those of that time back, or remove {record} to go on "
            "with these"
        )
    if known.keys() != found.keys():
        _record(record, problems, found)


def _recorded(record: Path) -> tuple[list[str], dict[str, str]]:
    """Returns the digest and the number of the problems, as far as they are there, and the other digests by
    their names."""
    lines = record.read_text().splitlines() if record.exists() else []
    named = dict(line.split(": ", 1) for line in lines if ": " in line)
    return [part for line in lines if ": " not in line for part in line.split()], named


def _record(record: Path, problems: Sequence[str], encoding: Mapping[str, str]) -> None:
    lines = [" ".join(problems)] if problems else []
    lines += [f"{name}: {digest}" for name, digest in encoding.items()]
    write_whole(record, "".join(f"{line}\n" for line in lines))


def _digest_of(path: Path, task: Task | None) -> str:
    """Returns the digest of the problems of `task`, or of the bytes of file `path` if `task` is None. The
    digest of a Python task is of its problems, so that its reward may change."""
    digest = xxhash.xxh3_128()
    if task is None:
        digest.update(path.read_bytes())
    else:
        read = (p for p in parts_of(task.train).values() if not isinstance(p, Lazy))
        for problem in (*chain.from_iterable(read), *task.heldout):
            row = (problem.columns,) if problem.columns else ()
            digest.update(msgspec.json.encode((problem.prompt, problem.answer, *row)))
    return digest.hexdigest()
