"""The tokens that end a response, what says so (every file of a model that names one), and the text before
them, which rewards judge. Imports no torch."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_q.config import Sampling
from areal_q.decode_errors import in_words
from areal_q.errors import CheckpointError, LogError
from areal_q.messages import Ticket, Trajectory
from areal_q.system.files import write_whole
from areal_q.system.run_dir import STOPS_FILE
from areal_q.tasks.base import Completed, Stop, Tokenizer

_CONFIGS = ("config.json", "generation_config.json")


def collect_stops(
    directory: Path,
    token_of: Callable[[int], str | None],
    tokenizer_eos: int | None,
    template_ends: Sequence[int],
) -> dict[int, Stop]:
    """Returns all end tokens that the tokenizer, the files in `directory` or the chat templates name.

    `token_of` returns the text of an id, None for one that the tokenizer does not know. Raises CheckpointError,
    which names the file, if `eos_token_id` in one of them is neither an id nor a list of ids.
    """
    named = {
        "tokenizer": [] if tokenizer_eos is None else [tokenizer_eos],
        "chat template": template_ends,
        **{name: named_ends(directory / name) for name in _CONFIGS},
    }
    sources: dict[int, list[str]] = {}
    for source, ids in named.items():
        for id in ids:
            sources.setdefault(id, []).append(source)
    return {id: Stop(token_of(id) or f"id {id}", tuple(said)) for id, said in sources.items()}


def stops_text(stops: Mapping[int, Stop]) -> str:
    """Example: "stops at <|im_end|> (tokenizer, chat template), <|endoftext|> (generation_config.json)"."""
    return f"stops at {', '.join(map(str, stops.values()))}"


def without_end(ids: Sequence[int], stops: Mapping[int, Stop]) -> Sequence[int]:
    """Returns `ids` without the end token, if the last one is one."""
    return ids[:-1] if len(ids) and ids[-1] in stops else ids


def stop_strings(sampling: Sampling) -> tuple[str, ...]:
    """Returns the stops that are text, and not token ids."""
    return tuple(stop for stop in sampling.stop if isinstance(stop, str))


def judged_text(
    ids: Sequence[int], mask: Sequence[int], tokenizer: Tokenizer, sampling: Sampling
) -> str:
    """Returns the text that rewards judge: the beginning that the chat template gave the reply and all that
    followed, special tokens included, but without the model's end token. It ends with the stop string that
    ended the last turn. `mask` is 1 for each of `ids` that the model drew."""
    text = tokenizer.decode(without_end(ids, tokenizer.stops))
    given = max((place for place, drawn in enumerate(mask, 1) if not drawn), default=0)
    before = len(tokenizer.decode(ids[:given]))
    return tokenizer.prefill + text[:before] + _cut_after(text[before:], stop_strings(sampling))


def logged_response(ticket: Ticket, logged: Trajectory, tokenizer: Tokenizer) -> Completed:
    """Returns a response of one path as rewards judged it: without the end of a prompt that the group's prompts
    do not share."""
    mask = logged.loss_mask.numpy().tolist()
    given = mask.index(1) if 1 in mask else 0
    ids, mask = logged.response_ids.numpy()[given:].tolist(), mask[given:]
    text = judged_text(ids, mask, tokenizer, ticket.sampling)
    return Completed(text, sum(mask), ids, logged.finish_reason)


def _cut_after(text: str, stops: Sequence[str]) -> str:
    """Returns `text` up to the end of the first stop string in it."""
    ends = [place + len(s) for s in stops if (place := text.find(s)) >= 0]
    return text[: min(ends, default=len(text))]


def write_stops(directory: Path, stops: Mapping[int, Stop]) -> None:
    """Writes `stops` to the run in `directory`, beside those of its earlier steps."""
    file = directory / STOPS_FILE
    earlier = read_stops(directory) if file.exists() else {}
    write_whole(file, msgspec.json.encode({**stops, **earlier}))


def read_stops(directory: Path) -> dict[int, Stop]:
    """Returns all that `write_stops` wrote. Raises LogError if the file cannot be read."""
    file = directory / STOPS_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[int, Stop])
    except (OSError, msgspec.DecodeError) as error:
        raise LogError(
            f"{file}: the ids that end a response cannot be read: {in_words(error)}"
        ) from error


def named_ends(file: Path) -> list[int]:
    """Returns the ids of ends that a file of a model names; none if there is no such file. Raises
    CheckpointError, which names the file, for anything else than an id or a list of ids."""
    if not file.is_file():
        return []
    try:
        table: Any = json.loads(file.read_bytes())
        text = table.get("text_config")  # of a model that sees images, too
        named = [t.get("eos_token_id") for t in (table, text) if t is not None]
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a JSON object: {error}") from error
    ids = list[int]()
    for it in named:
        these = [] if it is None else it if isinstance(it, list) else [it]
        if not all(type(id) is int and 0 <= id < 2**31 for id in these):
            raise CheckpointError(f"{file}: eos_token_id = {it!r} is no id, and no list of ids")
        ids += these
    return list(dict.fromkeys(ids))
