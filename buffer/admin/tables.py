"""A run's state in Redis as tables for a terminal, and as plain records for JSON.

All text from models and other untrusted sources passes through `escaped`, so that no control character reaches
a terminal.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import redis
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from areal_q.config import parse
from areal_q.errors import UserError
from areal_q.messages import Branch, Group, Trajectory
from areal_q.system.command import escaped
from areal_q.system.disk import size
from areal_q.tasks import Tokenizer, build_tokenizer
from buffer.admin import inspect_state
from buffer.admin.inspect_state import RefusedRecord, Status
from buffer.redis_store.keys import Keys

_MAX_TEXT = 2000
_Row = dict[str, Any]


def age(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def status_table(found: Status) -> RenderableType:
    limit = f" of {size(found.limit_bytes)}" if found.limit_bytes else ", no limit"
    durable = "append-only file" if found.append_only else "NOT durable: appendonly is off"
    policy = "" if found.policy == "noeviction" else f", policy {found.policy}: it may LOSE groups"
    head = (
        f"run {found.run} on {found.server}: {size(found.used_bytes)}{limit}, {durable}{policy}\n"
        f"next ticket {'–' if found.cursor is None else found.cursor}, "
        f"{found.set_aside} records ever set aside, "
        f"workers: {', '.join(found.workers) or 'none'}"
    )
    table = _table("stream", "entries", "claimed", "deliveries", "memory", "oldest", "newest")
    for s in found.streams:
        cells = (s.entries, s.claimed or "", s.deliveries or "", size(s.nbytes))
        table.add_row(s.name, *map(str, cells), age(s.oldest_s), age(s.newest_s))
    return Lines(Text("\n".join(map(escaped, head.split("\n")))), table)


def facts(client: redis.Redis, run: str, what: str, count: int) -> list[_Row]:
    """Returns the first `count` entries of one kind as plain records."""
    return list(islice(_rows(client, run, what), count))


def entries_table(client: redis.Redis, run: str, what: str, count: int) -> RenderableType:
    rows = facts(client, run, what, count)
    if not rows:
        return Text(f"no {what}")
    table = _table(*rows[0])
    for row in rows:
        cells = [f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()]
        table.add_row(*(Text(escaped(cell)[:160]) for cell in cells))
    return table


def group_facts(group: Group) -> _Row:
    """Returns everything in a group as a plain record, arrays as lists."""
    ticket = group.ticket
    return {
        "ticket": ticket.number,
        "run": ticket.run,
        "purpose": ticket.purpose,
        "admitted": ticket.step,
        "seed": ticket.seed,
        "prompt": ticket.prompt,
        "answer": ticket.answer,
        "source": ticket.source,
        "why": ticket.why,
        "prompt_ids": ticket.prompt_ids.numpy().tolist(),
        "sampling": ticket.sampling,
        "worker": group.worker,
        "engine": group.engine,
        "weight_format": group.weight_format,
        "started_s": group.started_s,
        "finished_s": group.finished_s,
        "trajectories": [
            {
                "index": t.index,
                "reward": t.reward,
                "reward_parts": t.reward_parts,
                "reward_notes": t.reward_notes,
                "valid": t.valid,
                "failure": t.failure,
                **_token_facts(t),
                **({"branches": [*map(_branch_facts, t.branches)]} if t.branches else {}),
            }
            for t in group.trajectories
        ],
    }


def _branch_facts(branch: Branch) -> _Row:
    return {"parent": branch.parent, "at": branch.at, **_token_facts(branch)}


def _token_facts(t: Trajectory | Branch) -> _Row:
    return {
        "finish_reason": t.finish_reason,
        "spans": t.spans,
        "response_ids": t.response_ids.numpy().tolist(),
        "behavior_logprobs": t.behavior_logprobs.numpy().tolist(),
        "loss_mask": t.loss_mask.numpy().tolist(),
        **({"turn_rewards": t.turn_rewards} if t.turn_rewards else {}),
    }


def group_view(group: Group, tokenizer: Tokenizer | None) -> RenderableType:
    """Returns one group in full: a head, and then each response with its text and its tokens."""
    ticket, lines = group.ticket, Text()
    lines.append(
        f"ticket {ticket.number}, admitted at version {ticket.step}, seed {ticket.seed}; "
        f"{escaped(group.worker)}, {escaped(group.engine)} {escaped(group.weight_format)}, "
        f"{group.finished_s - group.started_s:.2f} s\n"
    )
    for label, said in (("task    ", ticket.source), ("drawn   ", ticket.why)):
        if said:
            lines.append(label, style="bold").append(escaped(said)[:_MAX_TEXT] + "\n")
    lines.append("prompt  ", style="bold").append(escaped(ticket.prompt)[:_MAX_TEXT] + "\n")
    lines.append("answer  ", style="bold").append(escaped(ticket.answer)[:_MAX_TEXT] + "\n")
    parts: list[RenderableType] = [lines]
    for t in group.trajectories:
        parts += [_response(t, tokenizer), _tokens(t, tokenizer)]
        for number, branch in enumerate(t.branches, 1):
            parts += [_branch(number, branch, tokenizer), _tokens(branch, tokenizer)]
    return Lines(*parts)


def tokenizer_of(client: redis.Redis, run: str) -> Tokenizer | None:
    """Returns the tokenizer that the settings in Redis name. It is None if there are no settings, or if the
    tokenizer's files are not on this machine."""
    config: Any = client.hget(Keys(run).info, "config")
    if not config:
        return None
    try:
        settings = parse(config.decode(), f"run {run}")
        return build_tokenizer(settings.model, settings.task)
    except (UserError, ImportError, OSError):
        return None


def what_goes(found: Status, what: str) -> str:
    """Returns a description of what a purge would delete, such as "3 entries of the quarantine"."""
    if what == "all":
        return f"every key ({sum(s.entries for s in found.streams)} entries)"
    entries = next(s.entries for s in found.streams if s.name == what)
    return f"{entries} entries of the {what}"


def _rows(client: redis.Redis, run: str, what: str) -> Iterator[_Row]:
    keys = Keys(run)
    if what == "quarantine":
        yield from map(_refused_row, inspect_state.quarantine(client, run))
    elif what == "groups":
        yield from (_group_row(entry, group) for entry, group in inspect_state.groups(client, run))
    else:
        stream = keys.tickets if what == "tickets" else keys.eval_tickets
        for entry, t in inspect_state.tickets(client, stream):
            yield {"entry": entry, "ticket": t.number, "admitted": t.step, "prompt": t.prompt}


def _group_row(entry: str, group: Group) -> _Row:
    versions = sorted({s.version for t in group.trajectories for s in t.all_spans})
    rewards = [t.reward for t in group.valid_trajectories]
    return {
        "entry": entry,
        "ticket": group.ticket.number,
        "worker": group.worker,
        "responses": len(group.trajectories),
        "tokens": sum(t.all_tokens for t in group.trajectories),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "failed": len(group.trajectories) - len(rewards),
        "versions": f"{versions[0]}–{versions[-1]}",
        "prompt": group.ticket.prompt,
    }


def _refused_row(record: RefusedRecord) -> _Row:
    return {
        "id": record.id,
        "source": record.source.rpartition(":")[2],
        "bytes": record.nbytes,
        "whole": record.whole,
        "reason": record.reason,
    }


def _response(t: Trajectory, tokenizer: Tokenizer | None) -> Text:
    parts = ", ".join(f"{escaped(name)} {value:g}" for name, value in t.reward_parts.items())
    text = Text(f"response {t.index}  ", style="bold")
    reward = f"reward {t.reward:g} ({parts})" if t.valid else f"reward failed ({t.failure})"
    text.append(f"{reward}, {t.finish_reason}{_of_turns(t)}", style="not bold")
    for name, note in t.reward_notes.items():
        text.append(f"\n{escaped(name)}: {escaped(note[:_MAX_TEXT])}", style="not bold")
    if tokenizer:
        decoded = _decoded(tokenizer, t.response_ids.numpy().tolist())
        text.append(f"\n{decoded[:_MAX_TEXT]}", style="not bold")
    return text


def _branch(number: int, branch: Branch, tokenizer: Tokenizer | None) -> Text:
    text = Text(f"branch {number}  ", style="bold")
    said = f"after {branch.at} tokens of path {branch.parent}, {branch.finish_reason}{_of_turns(branch)}"
    text.append(said, style="not bold")
    if tokenizer:
        decoded = _decoded(tokenizer, branch.response_ids.numpy().tolist())
        text.append(f"\n{decoded[:_MAX_TEXT]}", style="not bold")
    return text


def _of_turns(t: Trajectory | Branch) -> str:
    found = ", ".join(f"{one.reward:g} at token {one.token}" for one in t.turn_rewards)
    return f"; turns: {found}" if found else ""


def _decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    try:
        return escaped(tokenizer.decode(ids))
    except (IndexError, KeyError, OverflowError):
        return "(outside the vocabulary)"


def _tokens(t: Trajectory | Branch, tokenizer: Tokenizer | None) -> Table:
    table = _table("token", "id", "text", "log-prob", "version", "counts")
    versions = [s.version for s in t.spans for _ in range(s.tokens)]
    columns = (t.response_ids, t.behavior_logprobs, t.loss_mask)
    rows = zip(*(column.numpy().tolist() for column in columns), versions, strict=True)
    for place, (id, logprob, counts, version) in enumerate(rows):
        text = _decoded(tokenizer, [id]) if tokenizer else ""
        cells = (place, id, Text(f"'{text}'"), f"{logprob:.4f}", version, "" if counts else "no")
        table.add_row(*(c if isinstance(c, Text) else str(c) for c in cells))
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, overflow="fold")
    return table
