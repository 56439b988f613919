"""The learner on several processes: `python -m areal_q.system.torchrun --nproc-per-node N -m learner …`.

    rank 0   train_step ─▶ MultiProcessUpdater.update ──samples──▶ every rank: update_policy on its share
             whole weights ◀──gathered, tensor by tensor──┘       (collectives of FSDP2, or of Megatron)

| wait              | for                         | unblocked by                                       |
|-------------------|-----------------------------|----------------------------------------------------|
| follow            | rank 0's next message       | MultiProcessUpdater's methods                      |
| every collective  | all other ranks             | their being alive: torchrun ends all when one dies |

Besides its shard, rank 0 has a whole copy of the weights in host memory, and of the moments only while a
checkpoint is written. It publishes, saves and exports exactly what a single process would, so that a run can
resume with any number of ranks and either backend. The other ranks need only rank 0 and the settings: neither
the model's files, nor Redis, nor the run's directory.
"""

import faulthandler
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import NoReturn

import msgspec
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from areal_q.checks.combinations import check_processes
from areal_q.config import MegatronBackend, Run, TorchBackend
from areal_q.config.load import with_rates
from areal_q.errors import RankLost
from areal_q.system.processes import end_with_parent
from areal_q.system.stop_request import StopRequest, ended_by_signals
from learner.arithmetic import set_arithmetic
from learner.backends.base import Shard
from learner.backends.data_parallel import Ranks
from learner.backends.messages import Begin, Collect, End, Message, Reset, SentSample, Step
from learner.backends.single_device import TorchPolicy
from learner.checkpoint.files import write_share
from learner.checkpoint.policy_state import forget_moments, moments_of
from learner.data.packing import Sample
from learner.measure.token_recorder import TokenRecorder
from learner.policy_update import update_policy

LOST_WORDS = ("gloo", "Connection closed by peer", "Connection reset by peer")
"""Words in gloo's errors about a broken connection to another process; such errors have no class of their
own."""
JOIN_S = 120.0
"""Seconds in which the processes that torchrun started meet, or else end."""
_decoder = msgspec.msgpack.Decoder(Message)


BACKENDS = {
    TorchBackend: "learner.backends.fsdp:fsdp_shard",
    MegatronBackend: "learner.backends.megatron.policy:megatron_shard",
}
"""The function that makes a rank's Shard, by the type of the backend's settings; its module is imported when it
is asked for."""


def _shard(begin: Begin, run: Run, ranks: Ranks, whole: TorchPolicy | None) -> Shard:
    """Returns this rank's part of rank 0's `whole` policy. Collective."""
    build = resolve_name(BACKENDS[type(run.learner.backend)])
    return build(begin, run, ranks, whole)


def join(run: Run) -> Ranks:
    """Joins the processes that torchrun started, and returns this one's rank among them. Raises ConfigError for
    settings that this number of processes, or the backend, does not support."""
    cfg = run.learner
    size, device = int(os.environ.get("WORLD_SIZE", "1")), cfg.device
    check_processes(run, size)
    if isinstance(cfg.backend, MegatronBackend):
        from learner.backends.megatron import require

        require(cfg.backend, size)
    # Rank 0 may wait long for rollouts; torchrun, not a timeout, notices that a process died.
    backend, timeout = (
        "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo",
        timedelta(days=7),
    )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A rank has a session of its own and would outlive a torchrun that was killed, beside the next ranks.
        end_with_parent()
    if "MASTER_ADDR" in os.environ:
        faulthandler.dump_traceback_later(JOIN_S, exit=True)
        with ended_by_signals():  # another rank may have been refused, and torchrun ends this one
            store, rank, _ = next(iter(rendezvous("env://")))
            dist.init_process_group(
                backend, store=_of_this_start(store), rank=rank, world_size=size, timeout=timeout
            )
        faulthandler.cancel_dump_traceback_later()
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return Ranks(dist.get_rank(), size)


def _of_this_start(store: Store) -> Store:
    """Returns a view of torchrun's store with keys of this start alone. After a restart the store still holds
    the addresses of the processes before: a process that is early would connect to one that is gone, and wait
    for ever. Over several hosts the store stays as it is, since each host counts its own restarts."""
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return store
    return PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def send(ranks: Ranks, message: Message) -> None:
    """Sends `message` from rank 0 to every other rank."""
    ranks.broadcast(msgspec.msgpack.encode(message))


def end_other_ranks(ranks: Ranks) -> None:
    """Ends the other ranks, as this process is about to end."""
    if dist.is_initialized():
        send(ranks, End())
        dist.destroy_process_group()


def exit_process(code: int = 0) -> NoReturn:
    """Ends this process with `code`, without the interpreter's finalization: if a collective's thread freed its
    last tensor during that, the process would abort, and torchrun would report a failed run."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def receive(ranks: Ranks) -> Message:
    """Returns rank 0's next message.

    Raises RankLost if rank 0 ended without one; the cause is in rank 0's log.
    """
    with names_a_lost_rank(ranks):
        return _decoder.decode(ranks.broadcast(b""))


@contextmanager
def names_a_lost_rank(ranks: Ranks) -> Iterator[None]:
    """A context that raises RankLost, with one line, if a collective fails because another process ended."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, dist.DistError) and not any(word in text for word in LOST_WORDS):
            raise
        why = text.splitlines()[0]
        raise RankLost(
            f"rank {ranks.rank}: another rank is gone: {why}; the run goes on from its newest checkpoint "
            "once all are started again"
        ) from error


class MultiProcessUpdater:
    """Rank 0's PolicyUpdater, whose updates all ranks make together."""

    def __init__(self, policy: TorchPolicy, run: Run, ranks: Ranks) -> None:
        """Shards `policy` over `ranks`; its own weights stay whole and are gathered after every update."""
        self.policy, self._ranks, self._run = policy, ranks, run
        self._broken = True
        """True while other ranks may be in the middle of a collective."""
        begin = Begin(
            policy.model.config.to_hf(),
            policy.temperature,
            policy.updates,
            policy.skipped,
            moments=bool(policy.optimizer.state),
            dtype=run.learner.dtype,
            rates=run.learner.rates,
            unquantized=run.rollout.unquantized,
        )
        send(ranks, begin)
        self._shard = _shard(begin, run, ranks, policy)
        self._broken = False
        forget_moments(policy)  # from now on they are in the shards of all ranks alone

    @property
    def shares(self) -> int:
        return self._ranks.size - 1 if self._run.checkpoint.sharded else 0

    def update(
        self, samples: Sequence[Sample], recorder: TokenRecorder | None = None
    ) -> dict[str, float]:
        whole = self.policy
        with self._together():
            send(self._ranks, Step([SentSample.of(sample) for sample in samples]))
            values = update_policy(self._shard, samples, recorder)
            whole.wait_until_read()
            self._shard.gather_weights(whole)
        whole.updates, whole.skipped = self._shard.updates, self._shard.skipped
        return values

    def collect(self, staged: Path | None = None) -> dict[str, Tensor]:
        with self._together():
            send(self._ranks, Collect(str(staged or "")))
            if staged:
                return self._shard.share_of_rest(self.policy)
            self._shard.gather_rest(self.policy)
        moments = moments_of(self.policy)
        forget_moments(self.policy)
        return moments

    def reset_reference(self) -> None:
        with self._together():
            send(self._ranks, Reset())
            self._shard.reset_reference()
        self.policy.reset_reference()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """A context of collectives. Raises RankLost where one fails because another process ended."""
        self._broken = True
        with names_a_lost_rank(self._ranks):
            yield
        self._broken = False

    def close(self) -> None:
        """Ends the other ranks. After a failure it sends them nothing, as this process ends with an error and
        torchrun then ends the others."""
        if not self._broken:
            # First the message: where all ranks have to end a group together, the others would wait for it.
            send(self._ranks, End())
            self._shard.close()
            dist.destroy_process_group()


def follow(run: Run, ranks: Ranks) -> None:
    """Runs a rank other than 0: it takes part in each step until rank 0 ends it."""
    begin = receive(ranks)
    if not isinstance(begin, Begin):
        dist.destroy_process_group()
        return
    learner = with_rates(msgspec.structs.replace(run.learner, dtype=begin.dtype), begin.rates)
    rollout = msgspec.structs.replace(run.rollout, unquantized=begin.unquantized)
    run = msgspec.structs.replace(run, learner=learner, rollout=rollout)
    with names_a_lost_rank(ranks):
        _take_part(_shard(begin, run, ranks, None), ranks)


def follow_and_exit(run: Run, stop: StopRequest) -> NoReturn:
    """Takes part in the steps of rank 0, and ends this process."""
    set_arithmetic(run.learner.threads, run.learner.device)
    if stop.is_set():
        exit_process(stop.exit_code)
    with stop.left_to_rank_0():
        ranks = join(run)
    follow(run, ranks)
    exit_process()


def _take_part(shard: Shard, ranks: Ranks) -> None:
    while True:
        match receive(ranks):
            case Step(pieces):
                update_policy(shard, [piece.sample() for piece in pieces])
                shard.gather_weights(None)
            case Collect(""):
                shard.gather_rest(None)
            case Collect(staged):
                write_share(Path(staged), ranks.rank, shard.share_of_rest(None))
            case Reset():
                shard.reset_reference()
            case _:
                shard.close()
                dist.destroy_process_group()
                return
