"""Builds a learner, one function per component, so that the loop need not know what was configured."""

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import typer
from msgspec.structs import replace

from areal_q.checks.model import check_fit, longest_prompt
from areal_q.checks.settings import check_sets
from areal_q.config import (
    BroadcastConfig,
    MegatronBackend,
    Run,
    TorchBackend,
    dump_toml,
    workers_hash,
)
from areal_q.errors import AReaLQError, ConfigError
from areal_q.models.shape import shape_of
from areal_q.observability.metrics_log import MetricsLog, read_metrics
from areal_q.observability.run_end import going_on
from areal_q.system import run_dir
from areal_q.system.processes import command_began
from areal_q.system.watchdog import Progress
from areal_q.tasks import (
    Problem,
    Task,
    Tokenizer,
    build_task,
    build_tokenizer,
    check_characters,
    check_reward,
    columns_for,
)
from areal_q.weights.version import WeightVersion
from buffer.logs.step_log import iter_steps
from buffer.redis_store import START, LearnerBuffer
from buffer.redis_store.lease import owner_of
from buffer.sampling.replay_pool import ReplayPool
from buffer.weight_sync import Endpoints, WeightServer
from learner import checkpoint
from learner.arithmetic import set_arithmetic
from learner.backends.data_parallel import ALONE, Ranks
from learner.backends.single_device import TorchPolicy
from learner.build_policy import build_policy
from learner.checkpoint.async_writer import CheckpointWriter
from learner.data.admission import Admission
from learner.data.eval_sets import problems_of_sets
from learner.data.group_reader import GroupReader
from learner.data.staleness import VersionHistory, forks_at
from learner.data.validation import check_data, check_encoding, check_kept, fits
from learner.heldout_eval import HeldOutEvaluation
from learner.loop import Learner
from learner.measure.buffer_metrics import BufferMetrics
from learner.measure.fidelity import FidelityMeter
from learner.measure.replay_check import ReplayCheck
from learner.measure.reward_check import RewardCheck
from learner.measure.step_logs import StepLogs, note_beginning
from learner.policy_update import PolicyUpdater, SingleProcessUpdater
from learner.publishing.version_builder import VersionBuilder
from learner.publishing.weight_publisher import WeightPublisher
from learner.teacher.build_teacher import build_teacher

logger = logging.getLogger(__name__)


def build_admission(
    run: Run,
    task: Task,
    tokenizer: Tokenizer,
    buffer: LearnerBuffer,
    state: checkpoint.State | None,
    own_sets: Mapping[str, Sequence[Problem]] | None = None,
) -> Admission:
    """Returns an admission that continues from the state in Redis, or from the checkpoint if Redis was lost.

    `own_sets` has the problems of the evaluation sets that have their own. A fresh run deletes what an earlier
    run of the same name left in Redis."""
    prepare_redis(buffer, state)
    new = partial(Admission, run, task, tokenizer, buffer, own_sets=own_sets)
    if state is None:
        return new(0, set())
    cursor, before = buffer.cursor(), set(state.outstanding)
    if cursor is None:
        buffer.position = START
        admission = new(state.cursor, set(), order=state.order)
        admission.issue(state.outstanding, state.step)
        return admission
    # Groups of tickets that were never admitted, because forged or of another history, are ignored.
    cursor = max(cursor, state.cursor)
    alive = {n for n in buffer.open_tickets() | set(buffer.unread()) if n < cursor}
    # A Redis that lost its last seconds has an older cursor, and contains finished tickets again.
    outstanding = {n for n in alive if n >= state.cursor} | (alive & before)
    admission = new(cursor, outstanding, (before - alive) | set(state.lost), state.order)
    if admission.order.remembers:
        for number, problem, why in buffer.drawn():
            if number in outstanding:
                admission.order.take_up(number, problem, why)
        admission.order.lost(before - alive)
    return admission


def prepare_redis(buffer: LearnerBuffer, state: checkpoint.State | None) -> None:
    """Deletes what an earlier run of this name, or asked by an earlier learner, is there, and begins to read
    groups at the position of the checkpoint."""
    if state is None:
        return buffer.forget()
    if (found := buffer.published_id()) not in ("", buffer.run_id):
        logger.warning("redis holds another run of this name (%s): its state is forgotten", found)
        buffer.forget()
    buffer.position = state.position
    if buffer.rewind():
        logger.warning(
            "redis gives groups smaller ids than the checkpoint knew: their stream is read anew"
        )
    buffer.drop_eval()  # the learner that asked for these evaluations has ended


def build_history(
    run: Run, directory: Path, buffer: LearnerBuffer, state: checkpoint.State | None
) -> tuple[VersionHistory, ReplayCheck]:
    """Returns the versions up to the checkpoint, if there is one, and the check whether the steps that were
    logged after it are repeated."""
    keep = run.learner.versions_kept
    if state is None:
        return VersionHistory(keep), ReplayCheck(0, {})
    history = VersionHistory(keep, state.digests, forks_at(state.step, state.forks, keep))
    logged = iter_steps(directory / "steps", state.step)
    recorded = {r.step + 1: r.digest for r in logged} | buffer.unread_digests()
    return history, ReplayCheck(state.step, recorded)


def reached_at(endpoint: str, host: str | None) -> str:
    """Returns `endpoint` as workers have to address it: a TCP endpoint with the name `host`, if one is given.

    Example: reached_at("tcp://0.0.0.0:5551", "learner") is "tcp://learner:5551"
    """
    if host is None or not endpoint.startswith("tcp://"):
        return endpoint
    return f"tcp://{host}:{endpoint.rpartition(':')[2]}"


def _check_broadcast(settings: BroadcastConfig, announce: str, fetch: str) -> None:
    """Raises ConfigError for a port in use or a missing key, before a warm start whose time would be lost."""
    try:
        WeightServer(announce, fetch, settings).close()
    except ConfigError as error:
        raise ConfigError(f"broadcast: {error}") from error


def has_ranks(run: Run) -> bool:
    """Returns True if the model is sharded by torch.distributed, over one process or several."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return several or isinstance(run.learner.backend, MegatronBackend)


def ranks_of(run: Run) -> Ranks:
    """Returns this process's rank among those that torchrun started; ALONE if the model is not sharded."""
    if not has_ranks(run):
        if (several := run.learner.processes) > 1:
            instead = f"python -m areal_q.system.torchrun --nproc-per-node {several}"
            logger.warning("learner.processes is for areal-q run, here it is %s", instead)
        return ALONE
    from learner.multi_process import join

    return join(run)


@contextmanager
def ends_other_ranks(ranks: Ranks) -> Iterator[None]:
    """A context that, if it is left by an error which this process will name, first ends the other ranks: they
    wait for its first message, and would name its end instead."""
    try:
        yield
    except AReaLQError:
        if ranks is not ALONE:
            from learner.multi_process import end_other_ranks

            with suppress(RuntimeError):  # one of them has ended already
                end_other_ranks(ranks)
        raise


def leave(run: Run, code: int) -> NoReturn:
    """Ends this process, which learnt as `run` says, with `code`."""
    if has_ranks(run):
        from learner.multi_process import exit_process

        exit_process(code)
    raise typer.Exit(code)


def of_whole(run: Run, ranks: Ranks) -> Run:
    """Returns the settings of the policy that rank 0 keeps whole: beside FSDP2's shards it lies in the host's
    memory, as no GPU has room for it that needs shards."""
    if ranks is ALONE or not isinstance(run.learner.backend, TorchBackend):
        return run
    return replace(run, learner=replace(run.learner, device="cpu"))


def updater_of(policy: TorchPolicy, run: Run, ranks: Ranks) -> PolicyUpdater:
    """Returns the updater of `policy`, which is sharded over `ranks` if there are several processes."""
    if ranks is ALONE:
        return SingleProcessUpdater(policy)
    from learner.multi_process import MultiProcessUpdater

    return MultiProcessUpdater(policy, run, ranks)


def build_learner(
    run: Run,
    directory: Path,
    redis_url: str,
    announce: str,
    fetch: str,
    resume: bool,
    stop: threading.Event,
    ranks: Ranks = ALONE,
    progress: Progress | None = None,
) -> Learner:
    """Returns a learner of `run` in `directory` that is ready to train, after checks in order of their cost.
    It notes each record and each poll for groups in `progress`.

    Raises what its components raise: ConfigError, CheckpointError, TaskError, or Stopped after `stop`.
    """
    set_arithmetic(run.learner.threads, run.learner.device)
    check_reward(run)
    _check_broadcast(run.broadcast, announce, fetch)
    tokenizer = build_tokenizer(run.model, run.task)
    task = build_task(run.task, columns_for(run))
    check_characters(run.model, run.warmstart, task)
    check_data(directory, run.task, task)
    check_encoding(directory, run.model, tokenizer)
    shape = shape_of(run.model, tokenizer)
    task = check_fit(run, shape, tokenizer, task, ranks.size)
    check_kept(directory, task)
    check_sets(run, task)
    own_sets = problems_of_sets(run, tokenizer, longest_prompt(run, shape))
    buffer = LearnerBuffer(redis_url, run.name, stop=stop)
    with ExitStack() as failed:
        failed.callback(buffer.close)
        saved = checkpoint.steps(directory / "checkpoints")
        id = checkpoint.read_state(saved[-1]).run_id if saved else ""
        buffer.acquire(owner_of(run_dir.run_id(directory, id), directory), stop)
        learner = _build(
            run, directory, buffer, task, tokenizer, own_sets, Endpoints(announce, fetch), resume, stop,
            ranks, progress or Progress(),
        )  # fmt: skip
        failed.pop_all()
    return learner


def _publisher(
    run: Run,
    policy: TorchPolicy,
    buffer: LearnerBuffer,
    history: VersionHistory,
    serves_at: Endpoints,
) -> tuple[WeightServer, WeightPublisher]:
    """Returns a server, of which the workers are told, and a publisher of `policy` that hands each version to
    it."""
    server = WeightServer(*serves_at, run.broadcast)
    endpoints = {
        k: reached_at(v, run.broadcast.host) for k, v in server.endpoints._asdict().items()
    }
    buffer.publish_run(dump_toml(run), endpoints, workers_hash(run))

    def hand_over(made: WeightVersion) -> None:
        # The history must contain a version before a worker draws with it, or its tokens would count as stale.
        history.add(made.manifest.version, made.manifest.digest)
        server.publish(made)

    builder = VersionBuilder(
        run, policy.sticky, buffer.run_id, smoothing=policy.smoothing, shared=True
    )
    return server, WeightPublisher(builder, hand_over)


def _build(
    run: Run, directory: Path, buffer: LearnerBuffer, task: Task, tokenizer: Tokenizer,
    own_sets: Mapping[str, Sequence[Problem]], serves_at: Endpoints, resume: bool, stop: threading.Event,
    ranks: Ranks, progress: Progress,
) -> Learner:  # fmt: skip
    metrics = MetricsLog(directory, began=command_began())
    if not resume:
        metrics.write("start", 0, {}, doing="loading the model")
    teacher = build_teacher(run, tokenizer, progress.beat, stop)
    policy, state = build_policy(
        of_whole(run, ranks), directory, resume, task, tokenizer, metrics, stop
    )
    start = state.step if state else 0
    updater = updater_of(policy, run, ranks)
    records = read_metrics(directory / run_dir.METRICS_FILE) if resume else []
    told = [*going_on(run, directory, start, records)]
    if resume:
        metrics.rewind(start)
        records = [record for record in records if record["step"] <= start]
    note_beginning(run, directory, start, tokenizer, metrics, told)
    admission = build_admission(run, task, tokenizer, buffer, state, own_sets)
    buffer.checks = [admission.check, fits(policy.model.config, run.learner)]
    history, replay_check = build_history(run, directory, buffer, state)
    pool = ReplayPool(
        run.buffer, run.learner, run.seed, run.steps, buffer.position, state.uses if state else None
    )
    weight_server, publisher = _publisher(run, policy, buffer, history, serves_at)
    writer = CheckpointWriter(directory / "checkpoints", run.checkpoint)
    policy.readers += [publisher.wait_until_read, writer.wait_until_read]
    metrics.also("progress", lambda _: progress.beat())
    heldout = HeldOutEvaluation(admission, buffer, tokenizer, metrics, run, start, records)
    return Learner(
        run=run, step=start, updater=updater, buffer=buffer, admission=admission, history=history,
        group_reader=GroupReader(buffer, admission, history, run.learner, pool), heldout=heldout,
        replay_check=replay_check, teacher=teacher,
        fidelity=FidelityMeter(run.learner, run.rollout.format), reward_check=RewardCheck(run, tokenizer),
        buffer_metrics=BufferMetrics(buffer, run.rollout.environment, metrics), publisher=publisher,
        weight_server=weight_server, logs=StepLogs(run, directory, start, scores_here=ranks is ALONE),
        metrics=metrics, progress=progress, checkpoints=writer, totals_before=state.totals if state else {},
    )  # fmt: skip
