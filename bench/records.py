"""Sound records of a run, for benches and tests: each of their fields can be given another value."""

from typing import Any

import numpy as np
from msgspec.structs import replace

from areal_q.config import Sampling
from areal_q.messages import Array, Group, Ticket, Trajectory, VersionSpan, WorkerStatus
from areal_q.messages.tokens import mask_array


def make_ticket(number: int = 0, **fields: Any) -> Ticket:
    """Returns ticket `number` of the run "run": two responses to a prompt of three tokens."""
    sound = Ticket(
        run="run", number=number, step=0, prompt=f"{number}+1=", answer=str(number + 1),
        prompt_ids=Array.of([1, 2, 3], "int32"), group_size=2, sampling=Sampling(max_tokens=8),
        seed=1000 + number,
    )  # fmt: skip
    return replace(sound, **fields)


def make_trajectory(index: int, ids: Any, logprobs: Any = -1.0, **fields: Any) -> Trajectory:
    """Returns a response of the tokens `ids`, all learnt from, drawn by version 0 with these log-probs."""
    count = len(ids)
    sound = Trajectory(
        index=index,
        response_ids=Array.of(ids, "int32"),
        behavior_logprobs=Array.of(np.broadcast_to(logprobs, count), "float32"),
        loss_mask=Array.of(np.ones(count), "uint8"),
        spans=[VersionSpan(0, count, "a0")],
        finish_reason="stop",
        reward=0.0,
    )
    return replace(sound, **fields)


def drawn_trajectory(index: int, completion: Any, **fields: Any) -> Trajectory:
    """Returns what an engine has completed (rollout/engines/base.py), not scored."""
    c = completion
    told = {"spans": c.spans, "finish_reason": c.finish_reason or "length"}
    told |= {
        "routes": None if c.routes is None else Array.of(c.routes),
        "sampling_mask": mask_array(c.sampling_mask or []),
    }
    return make_trajectory(index, c.response_ids, c.logprobs, **(told | fields))


def make_group(ticket: Ticket | None = None, **fields: Any) -> Group:
    """Returns an answer to `ticket`: responses of 2, 3, … tokens, drawn from it by the ticket's seed."""
    ticket = ticket or make_ticket()
    if "trajectories" not in fields:
        rng = np.random.default_rng(ticket.seed)
        fields["trajectories"] = [_drawn(rng, index) for index in range(ticket.group_size)]
    sound: dict[str, Any] = {"worker": "worker-0", "engine": "scripted", "weight_format": "int8"}
    return Group(ticket=ticket, **{**sound, "started_s": 1.0, "finished_s": 2.5, **fields})


def _drawn(rng: np.random.Generator, index: int) -> Trajectory:
    tokens, right = index + 2, float(index % 2)
    spans = [VersionSpan(0, 1, "a0"), VersionSpan(1, tokens - 1, "b1")]
    ids, logprobs = rng.integers(0, 100, tokens), -rng.random(tokens)
    return make_trajectory(
        index, ids, logprobs, spans=spans, reward=right, reward_parts={"correct": right}
    )


def make_beat(worker: str = "w", **fields: Any) -> WorkerStatus:
    """Returns the heartbeat of a worker that has done nothing yet."""
    counts = dict.fromkeys(("version", "active", "tokens", "groups", "swaps"), 0)
    rates = dict.fromkeys(("tokens_per_s", "idle_share", "swap_s", "time_s"), 0.0)
    sound: dict[str, Any] = {"pid": 1, **counts, **rates, **fields}
    return WorkerStatus(worker=worker, **sound)
