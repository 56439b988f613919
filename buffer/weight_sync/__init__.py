"""Weight sync: the learner's versions of the weights on their way to the workers, over ZeroMQ.

    learner                                                        worker (any number), or a relay
    WeightServer.publish(version)                                  await WeightSubscriber.wait() ─▶ engine
      │ latest wins (1)                                              ▲ latest wins (1)
      ▼                                                              │ every hash verified (2)
    delta to the version before ──PUB: delta once ──────────────▶ applied to a copy of the version held
      │                           PUB: announcement, repeated ──▶ newer than what is held? (3)
      ▼                                                              │ what is missing is asked for
    versions and deltas held (4) ◀─ROUTER: deltas, or chunks of a version, `credit` at a time ─┘

1. Neither side waits for the other. Versions may be skipped; they are never repeated or out of order
   (test_versions_published_faster_than_taken_are_skipped,
   test_a_stopped_worker_holds_up_nobody_and_catches_up).
2. An engine gets the published bytes or nothing: what does not hash to its manifest is refused, counted and
   fetched anew (test_faulty_broadcasts_never_give_other_weights, test_faulty_answers_never_give_other_weights).
3. A lost message only delays. A late subscriber gets the newest version, one that is some versions behind gets
   deltas, and a restarted learner is known by its epoch (test_a_late_joiner_gets_the_newest_version,
   test_a_worker_behind_fetches_deltas_or_else_a_snapshot, test_a_learner_that_ends_anywhere_is_followed_again,
   test_a_worker_that_ends_anywhere_disturbs_nobody).
   Weights of another run are refused by the run's id, also those of an earlier run of its name that a relay
   still holds (test_a_relay_that_holds_an_earlier_run_gives_nothing).
4. Memory is bounded on both sides: `hold` versions and `hold_deltas` deltas are held, a few messages wait for
   each peer (test_memory_does_not_grow_over_a_thousand_versions, test_deltas_held_stay_below_their_limit).

Example, both ends in one process:

    server = WeightServer("ipc:///tmp/announce", "ipc:///tmp/fetch")
    subscriber = WeightSubscriber(*server.endpoints, run="demo")
    server.publish(version)                      # areal_q.weights.version.pack_version(tensors, …)
    received = await subscriber.wait()           # received.tensors: name to tensor, ready for the engine
    subscriber.close(), server.close()

What each side promises in detail, and the way of a version file by file: docs/weights.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from buffer.weight_sync.sockets import Endpoints, WeightSource

if TYPE_CHECKING:
    from buffer.weight_sync.server import WeightServer
    from buffer.weight_sync.subscriber import WeightSubscriber

__all__ = ["Endpoints", "WeightServer", "WeightSource", "WeightSubscriber"]
_NEED_TORCH = {"WeightServer": "server", "WeightSubscriber": "subscriber"}


def __getattr__(name: str) -> Any:
    """Imports an end of the protocol when it is first used: both need torch, which takes two seconds that no
    command which only asks or makes keys should take."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
