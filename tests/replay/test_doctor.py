"""The doctor on logs made here: causes are planted, found, and not found where they were not planted."""

import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from areal_q.config import Run, Sampling, dump_toml, load, override, settings_hash
from areal_q.errors import ConfigError, LogError, TaskError
from areal_q.messages import Array, Group, Trajectory, VersionSpan
from areal_q.models import Decoder, DecoderConfig, init_weights
from areal_q.observability.learning_faults import Fault
from areal_q.observability.metrics_log import MetricsLog
from areal_q.quant import is_quantized
from areal_q.system.run_dir import STOPS_FILE, keep_settings
from areal_q.tasks.base import Stop
from areal_q.tasks.encoding.tokenizer import CharTokenizer
from areal_q.tasks.stops import write_stops
from bench.records import make_group, make_ticket, make_trajectory
from buffer.logs.step_log import StepLog, StepRecord
from buffer.logs.trajectory_log import TrajectoryLog
from buffer.sampling.replay_pool import SampledGroups
from learner import checkpoint
from learner.arithmetic import machine_name
from learner.backends.single_device import TorchPolicy, token_logprobs
from learner.data.packing import pack_samples, samples_of
from learner.data.staleness import VersionHistory
from learner.doctor.cli import main
from learner.doctor.diagnosis import TERMS, Case, LogFacts, TokenTable, diagnose, look_at
from learner.doctor.diagnosis.group_checks import has_loop, longest_run
from learner.doctor.diagnosis.token_ratios import histogram, rms, split_by_term
from learner.doctor.examine import Examined, empty, examine
from learner.doctor.probe import VersionPolicies
from learner.doctor.tables import bars, doctor_screen
from learner.policy_update import SingleProcessUpdater
from learner.publishing.version_builder import VersionBuilder
from learner.replay.compare import compare
from learner.replay.replay_steps import Replay
from learner.train_step import train_step

GROUPS, SIZE, TOKENS, STEPS = 4, 4, 40, 4
EOS = CharTokenizer().eos_id
TURN_END = CharTokenizer().vocab_size - 1
"""An end of which the model's config.json says nothing, as that of a chat template"""
RUN = override(
    Run(),
    "learner.groups=4",
    "learner.group_size=4",
    "learner.max_lag=2",
    "learner.optimizer.lr=1e-4",
    "rollout.sampling.max_tokens=40",
)

Plant = Callable[[Trajectory, int], Trajectory]
"""(a trajectory, its step) → what is logged in its place"""


@dataclass
class World:
    """A run without engine: responses at random, scored by the version that would have drawn them."""

    directory: Path
    run: Run = RUN
    lag: int = 0
    temperature: float = 1.0
    """Recorded, and drawn with"""
    plant: Plant = lambda trajectory, step: trajectory
    draw: str = "random"
    """What responses are: tokens at random, or a piece of three over and over"""
    outlier: float = 1.0
    """Factor on one input of every quantized linear: it sets the scale, and the others lose precision"""

    def play(self) -> Examined:
        """Writes the run's directory and examines it."""
        torch.manual_seed(0)
        config = DecoderConfig(
            family="qwen3", vocab_size=CharTokenizer().vocab_size, width=32, layers=2, heads=2,
            kv_heads=1, head_dim=16, mlp=64, max_positions=128, eos_ids=(EOS,),
        )  # fmt: skip
        model = Decoder(config)
        init_weights(model, 0)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if is_quantized(name):
                    weight[:, 0] *= self.outlier
        policy = TorchPolicy(model, self.run.learner, self.run.rollout.sampling.temperature)
        history, builder = VersionHistory(4), VersionBuilder(self.run)
        history.add(0, builder.build(model, 0).manifest.digest)
        self.directory.mkdir()
        (self.directory / "config.toml").write_text(dump_toml(self.run))
        keep_settings(self.directory, self.run)
        write_stops(self.directory, {id: Stop(f"<{id}>", ("test",)) for id in (EOS, TURN_END)})
        self._save(policy, history)
        log = TrajectoryLog(self.directory / "trajectories")
        steps = StepLog(self.directory / "steps")
        versions: list[VersionPolicies] = []
        for step in range(STEPS):
            versions.append(VersionPolicies(model, self.run, step))
            drawn_by = max(0, step - self.lag)
            groups = [
                self._group(policy, versions[drawn_by], history, drawn_by, step, n)
                for n in range(GROUPS)
            ]
            planted = [self._planted(group, step) for group in groups]
            # The learner meets what is logged, unless its contract forbids that.
            sound = all(
                np.isfinite(t.behavior_logprobs.numpy()).all()
                for g in planted
                for t in g.trajectories
            )
            batch = SampledGroups(planted if sound else groups)
            metrics = train_step(SingleProcessUpdater(policy), batch, history, step)
            digest = builder.build(model, step + 1).manifest.digest
            base = history.digests[step]
            history.add(step + 1, digest)
            log.append(step, step, planted)
            steps.append(
                StepRecord(
                    step=step, tickets=[g.ticket.number for g in groups], seeds=[0] * GROUPS,
                    base_digest=base, digest=digest, fork=0, settings=settings_hash(self.run),
                    machine=machine_name("cpu"),
                    metrics=metrics,
                )
            )  # fmt: skip
        log.close()
        steps.close()
        return examine(self.directory, 0, None)

    def _save(self, policy: TorchPolicy, history: VersionHistory) -> None:
        state = checkpoint.State(
            step=0, position="0-0", cursor=0, outstanding=[], digests=history.digests, updates=0,
            skipped=0, model=policy.model.config.to_hf(),
        )  # fmt: skip
        checkpoint.save(self.directory / "checkpoints", state, policy, keep=1)

    def _group(
        self,
        policy: TorchPolicy,
        version: VersionPolicies,
        history: VersionHistory,
        u: int,
        step: int,
        n: int,
    ) -> Group:
        rng = np.random.default_rng([step, n])
        ticket = make_ticket(
            step * GROUPS + n, step=u, prompt_ids=Array.of(rng.integers(3, 20, 4), "int32"),
            group_size=SIZE, sampling=Sampling(temperature=self.temperature, max_tokens=TOKENS),
        )  # fmt: skip
        spans = [VersionSpan(u, TOKENS, history.digests[u])]
        answers = [
            make_trajectory(i, self._ids(rng), 0.0, spans=spans, reward=float(i % 2))
            for i in range(SIZE)
        ]
        format = self.run.rollout.format
        group = make_group(ticket, engine="torch", weight_format=format, trajectories=answers)
        samples = samples_of(SampledGroups([group]), policy.cfg.advantage, history, step)
        with torch.no_grad():
            batch = pack_samples(samples)
            scores = token_logprobs(version.engine, batch, self.temperature)[0].numpy()
        return msgspec.structs.replace(
            group,
            trajectories=[
                msgspec.structs.replace(t, behavior_logprobs=Array.of(values))
                for t, values in zip(group.trajectories, scores.reshape(SIZE, TOKENS), strict=True)
            ],
        )

    def _ids(self, rng: np.random.Generator) -> np.ndarray:
        ids = rng.integers(3, 20, TOKENS)
        if self.draw == "loops":
            ids[10:] = np.resize(ids[10:13], TOKENS - 10)
        return ids

    def _planted(self, group: Group, step: int) -> Group:
        changed = [self.plant(t, step) for t in group.trajectories]
        return msgspec.structs.replace(group, trajectories=changed)


def with_logprobs(change: Callable[[np.ndarray], np.ndarray]) -> Plant:
    def plant(t: Trajectory, step: int) -> Trajectory:
        values = change(t.behavior_logprobs.numpy().copy()).astype(np.float32)
        return msgspec.structs.replace(t, behavior_logprobs=Array.of(values))

    return plant


def with_in_the_middle(id: int) -> Plant:
    def plant(t: Trajectory, step: int) -> Trajectory:
        ids = t.response_ids.numpy().copy()
        ids[30] = id
        return msgspec.structs.replace(t, response_ids=Array.of(ids))

    return plant


def swapped_with_a_cost(t: Trajectory, step: int) -> Trajectory:
    """Two spans of the same version: what comes after the swap has another gap."""
    [span] = t.spans
    halves = [replace_span(span, 20), replace_span(span, 20)]
    values = t.behavior_logprobs.numpy().copy()
    values[20:] -= np.float32(0.3) * (1 - 2 * (np.arange(20) % 2))
    return msgspec.structs.replace(
        t, spans=halves, behavior_logprobs=Array.of(np.minimum(values, 0.0))
    )


def replace_span(span: VersionSpan, tokens: int) -> VersionSpan:
    return VersionSpan(span.version, tokens, span.digest)


def alternating(size: float) -> Callable[[np.ndarray], np.ndarray]:
    signs = 1 - 2 * (np.arange(TOKENS) % 2)
    return lambda values: np.minimum(values + size * signs, 0.0)


def growing(values: np.ndarray) -> np.ndarray:
    place = np.arange(TOKENS)
    return np.minimum(values + 0.01 * place * (1 - 2 * (place % 2)), 0.0)


def at(values: np.ndarray, place: int, value: float) -> np.ndarray:
    values[place] = value
    return values


PLANTS = {
    "missing log-probs": {"plant": with_logprobs(lambda v: at(v, 7, np.nan))},
    "positive log-probs": {"plant": with_logprobs(lambda v: at(v, 7, 0.5))},
    "zeros for log-probs": {"plant": with_logprobs(lambda v: at(v, 7, 0.0))},
    "padding counts": {"plant": with_in_the_middle(EOS)},
    "sampling settings": {"temperature": 1.3},
    "engine": {"plant": with_logprobs(alternating(0.2))},
    "cached keys of older weights": {"plant": swapped_with_a_cost},
    "staleness": {
        "lag": 2,
        "run": override(RUN, "learner.optimizer.lr=2e-2", "learner.optimizer.warmup_steps=0"),
    },
    "grows with position": {"plant": with_logprobs(growing)},
    "quantization": {"outlier": 60.0},
    "heavy tail": {"plant": with_logprobs(lambda v: at(v, 3, -9.0))},
    "repetition": {"draw": "loops"},
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Examined:
    return World(tmp_path_factory.mktemp("healthy") / "run").play()


def names(examined: Examined) -> set[str]:
    return {finding.name for finding in examined.findings}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("cause", PLANTS)
def test_planted_cause_is_named_with_a_number_and_a_remedy(tmp_path, healthy, cause):
    planted = World(tmp_path / "run", **PLANTS[cause]).play()
    assert cause in names(planted)
    assert cause not in names(healthy)
    finding = next(f for f in planted.findings if f.name == cause)
    assert finding.number > 0 and any(c.isdigit() for c in finding.says) and finding.change


@pytest.mark.parametrize(
    ("mask", "behind"),
    [([1, 1, 1, 0, 0, 0, 1, 1, 1], 0), ([1] * 9, 6), ([1, 1, 1, 1, 0, 0, 1, 1, 1], 1)],
)
def test_a_turn_that_follows_on_a_message_is_not_behind_an_end(mask: list[int], behind: int):
    """Every run of several turns was told to draw behind ends."""
    ids = [5, 6, 2, 9, 9, 9, 7, 8, 2]
    response = make_trajectory(0, ids, -0.5, loss_mask=Array.of(mask, "uint8"))
    facts = look_at([(0, [make_group(trajectories=[response])])], [2])
    assert facts.after_end == behind


@pytest.mark.timeout(60)
def test_a_changed_loss_costs_the_decomposition_alone(tmp_path, monkeypatch):
    World(tmp_path / "run").play()

    def changed(*_: object) -> None:
        raise TaskError("mine.py: it is not what the run began with; put it back")

    monkeypatch.setattr("learner.doctor.examine._replay", changed)
    found = examine(tmp_path / "run", 0, None)
    assert "no decomposition: mine.py" in found.note and found.facts.responses


@pytest.mark.timeout(60)
def test_a_device_that_is_not_here_costs_the_decomposition_alone(tmp_path):
    """The replay says in a line how to do without, and does."""
    World(tmp_path / "run").play()
    elsewhere = override(RUN, "learner.device=xpu:99")
    for file in ("config.toml", f"settings/{settings_hash(RUN)}.toml"):
        (tmp_path / "run" / file).write_text(dump_toml(elsewhere))
    said = r"^learner\.device = 'xpu:99': .*; areal-q replay --set learner\.device=cpu needs none$"
    with pytest.raises(ConfigError, match=said):
        Replay(tmp_path / "run")
    found = examine(tmp_path / "run", 0, None)
    assert "no decomposition: learner.device = 'xpu:99'" in found.note and found.facts.responses
    steps = list((replay := Replay(tmp_path / "run", ["learner.device=cpu"])).steps())
    assert len(steps) == STEPS and not any(compare(one, replay.exact) for one in steps)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_experts_that_a_model_lacks_are_no_setting_of_a_replay(tmp_path, monkeypatch, kind):
    """Of a pretrained model, of which the settings alone say nothing; the second is by transformers."""
    run = override(RUN, "model.type=pretrained", "model.path=gone", "learner.uaq=1.0")
    World(tmp_path / "run", run).play()
    state = checkpoint.read_state(tmp_path / "run" / "checkpoints" / "step-000000")
    shape = DecoderConfig.from_hf(state.model)
    if kind == "mixtral":
        shape = msgspec.structs.replace(shape, family=kind, foreign={"model_type": kind})
    monkeypatch.setattr(DecoderConfig, "from_hf", lambda _: shape)
    for setting in ("learner.router_aux_coef=0.1", "learner.routing_replay=true"):
        with pytest.raises(ConfigError, match=rf"^{setting.split('=')[0]}: .*{kind}"):
            Replay(tmp_path / "run", [setting])


@pytest.mark.timeout(60)
def test_padding_after_an_end_not_in_config_json_is_found(tmp_path):
    planted = World(tmp_path / "run", plant=with_in_the_middle(TURN_END)).play()
    assert planted.facts.after_end == STEPS * GROUPS * SIZE * (TOKENS - 31)
    (tmp_path / "run" / STOPS_FILE).write_text("{")
    with pytest.raises(LogError, match=STOPS_FILE):
        examine(tmp_path / "run", 0, None)


def test_nothing_is_found_in_a_healthy_run(healthy):
    assert names(healthy) == set()
    assert healthy.exact


@pytest.mark.timeout(60)
def test_where_the_replay_begins_and_how_far_it_is_is_told(tmp_path, capsys):
    World(tmp_path / "run").play()
    capsys.readouterr()
    examine(tmp_path / "run", 0, None)
    whole = capsys.readouterr().err.splitlines()
    assert whole == [f"{n} of {STEPS} steps replayed" for n in range(1, STEPS)]
    examine(tmp_path / "run", 1, None)
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith(
        "the replay begins at step 0: no later checkpoint before step 1 was kept"
    )
    assert others == whole


@pytest.mark.timeout(60)
def test_terms_add_up_to_the_gap_of_every_token(tmp_path):
    x = World(tmp_path / "run", lag=2, plant=with_logprobs(alternating(0.2))).play()
    assert x.tokens.known.all() and len(x.tokens) == STEPS * GROUPS * SIZE * TOKENS
    np.testing.assert_allclose(x.tokens.terms.sum(-1), x.tokens.log_w, atol=1e-12)
    parts = split_by_term(x.tokens)
    assert sum(p.share for p in parts) == pytest.approx(1)
    assert sum(p.kl for p in parts) == pytest.approx(-x.tokens.log_w.mean())


def test_each_term_is_the_gap_of_its_own_link(healthy):
    """Without lag, with the format's own arithmetic as the engine: only quantization is left."""
    rms = {p.term: p.rms for p in split_by_term(healthy.tokens)}
    assert rms["weights"] > 1e-4 and rms["activations"] > 1e-4
    assert rms["staleness"] == rms["sampling"] == rms["cache"] == 0.0
    assert rms["engine"] < 1e-5


@pytest.mark.timeout(60)
def test_the_planted_amount_comes_out_as_the_engines_term(tmp_path):
    x = World(tmp_path / "run", plant=with_logprobs(alternating(0.2))).play()
    i = TERMS.index("engine")
    lowered = x.tokens.behavior < 0  # a few were cut at 0
    assert np.abs(x.tokens.terms[lowered, i]) == pytest.approx(0.2, abs=1e-4)


def test_a_temperature_of_its_own_is_the_sampling_term(tmp_path):
    x = World(tmp_path / "run", temperature=1.3).play()
    rms = {p.term: p.rms for p in split_by_term(x.tokens)}
    assert rms["sampling"] > 0.05 and rms["engine"] < 1e-5


def test_without_quantization_no_gap_is_left(tmp_path):
    run = override(RUN, "rollout.format=bf16")
    plain = replace(World(tmp_path / "run"), run=run).play()
    rms = {p.term: p.rms for p in split_by_term(plain.tokens)}
    assert rms["activations"] < 1e-5 and rms["engine"] < 1e-5


@pytest.mark.parametrize(
    ("cut_off", "right", "name"),
    [(37, 0, "cut off"), (16, 0, "cut off"), (15, 0, "no right answer yet"), (37, 1, None)],
)
def test_no_right_answer_is_named_with_its_likely_cause(cut_off, right, name):
    facts = LogFacts(responses=64, scored=64, cut_off=cut_off, right=right)
    found = {f.name: f for f in diagnose(Case(RUN, facts, empty()))}
    assert set(found) == ({name} if name else set())
    if name == "cut off":
        assert f"{cut_off / 64:.0%} of them were cut off" in found[name].says


def test_right_answers_are_counted_by_the_grader():
    right = make_trajectory(0, [3, 4], 0.0, reward=0.2)
    ends = [
        msgspec.structs.replace(right, reward_parts={"correct": 1.0}),
        msgspec.structs.replace(
            right, index=1, reward_parts={}, reward=1.0, finish_reason="length"
        ),
        msgspec.structs.replace(right, index=2, reward_parts={}, finish_reason="stop"),
        msgspec.structs.replace(right, index=3, valid=False, failure="timeout"),
    ]
    facts = look_at([(0, [make_group(make_ticket(0, group_size=4), trajectories=ends)])])
    assert (facts.scored, facts.right, facts.cut_off) == (3, 2, 1)


def test_garble_is_found_where_bursts_are_absurd():
    rng = np.random.default_rng(0)
    n = 1000
    base = {
        "step": np.zeros(n, int), "lag": np.zeros(n, int), "position": np.tile(np.arange(20), 50),
        "response": np.repeat(np.arange(50), 20), "advantage": np.repeat(np.tile([1.0, -1.0], 25), 20),
        "entropy": np.full(n, 1.0), "terms": np.full((n, len(TERMS)), np.nan),
    }  # fmt: skip
    calm = -rng.exponential(1.0, n)
    wild = calm.copy()
    wild[25:31] = -8.0
    for values, found in ((calm, False), (wild, True)):
        tokens = replace(empty(), **base, proximal=values, behavior=values)
        case = Case(RUN, look_at([]), tokens)
        assert ("garble" in {f.name for f in diagnose(case)}) == found


@pytest.mark.parametrize(
    ("experts", "replayed", "share", "found"),
    [
        (False, False, None, ""),
        (True, False, None, "routes are not replayed"),
        (True, True, None, ""),
        (True, True, 0.01, ""),
        (True, True, 0.12, "routes"),
    ],
)
def test_routes_are_named_where_experts_disagree(experts, replayed, share, found):
    run = override(RUN, "model.experts=4", f"learner.routing_replay={str(replayed).lower()}")
    named = [f.name for f in diagnose(Case(run, look_at([]), empty(), share, experts))]
    assert named == ([found] if found else [])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.booleans(), max_size=30))
def test_longest_run_equals_a_plain_loop(flags):
    best = now = 0
    for flag in flags:
        now = now + 1 if flag else 0
        best = max(best, now)
    assert longest_run(np.array(flags, bool)) == best


@pytest.mark.parametrize(
    ("ids", "loop"),
    [
        ([5, 6, 7] * 5 + [5], True),
        ([9, 8, 1] + [5] * 16, True),
        ([5] * 15, False),
        (list(range(40)), False),
        (list(range(12)) * 3, False),
        (list(range(12)) * 4, True),
    ],
)
def test_a_loop_is_sixteen_tokens_and_four_times(ids, loop):
    assert has_loop(np.array(ids)) == loop


def test_one_screen_and_the_same_numbers_as_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    World(tmp_path / "run", lag=1, plant=with_logprobs(alternating(0.2))).play()
    with pytest.raises(typer.Exit) as exit:
        main(tmp_path / "run")
    assert exit.value.exit_code == 1
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 40 and "engine" in out
    table = msgspec.json.decode((tmp_path / "run" / "doctor.json").read_bytes())
    assert [part["term"] for part in table["terms"]] == list(TERMS)
    assert {x["lag"] for x in table["by_lag"]} == {0, 1}
    assert sum(table["by_lag"][0]["histogram"]) == table["by_lag"][0]["tokens"]
    assert "engine" in {finding["name"] for finding in table["findings"]}


@pytest.mark.parametrize(
    ("world", "verdict"),
    [({}, "fine: nothing that a rule knows is wrong"), (PLANTS["engine"], "look at: engine")],
    ids=["healthy", "engine"],
)
def test_the_screen_has_its_verdict_first_and_fits_80_columns(tmp_path, world, verdict):
    x = World(tmp_path / "run", **world).play()
    console = Console(record=True, width=80, file=io.StringIO())
    doctor_screen(replace(x, directory=Path("runs/demo")), console)
    lines = console.export_text().splitlines()
    assert lines[1].startswith(verdict)
    assert not any(line.rstrip().endswith("…") for line in lines)
    numbers = next(line for line in lines if line.split()[:2] == ["lag", "tokens"]).split()
    assert numbers[-2:] == ["largest", "w"]
    assert max(map(len, lines)) <= 80
    drawn = next(line for line in lines if line.startswith(" lag 0"))
    whole = bars(histogram(x.tokens, max(0.01, 3 * rms(x.tokens.log_w))))
    assert drawn.removeprefix(" lag 0  ").rstrip() == whole.rstrip()


def case_of(term: str, run: Run, noise: float) -> Case:
    """Returns a case of 1,000 tokens with a gap of ± 0.2 nats, all of it the term `term`."""
    n = 1000
    gap = np.resize([0.2, -0.2], n)
    terms = np.zeros((n, len(TERMS)))
    terms[:, TERMS.index(term)] = gap
    whole = dict.fromkeys(("step", "lag", "position", "response"), np.zeros(n, int))
    real = {"advantage": np.zeros(n), "behavior": np.full(n, -1.0), "entropy": np.ones(n)}
    table = TokenTable(**whole, **real, proximal=gap - 1, terms=terms)
    facts = LogFacts(responses=n, tokens=n)
    return Case(run, facts, table, noise_rms=noise)


@pytest.mark.parametrize(
    ("noise", "name", "severity"),
    [(0.18, "rounding noise", "warning"), (0.05, "engine", "error"), (0.0, "engine", "error")],
)
def test_a_gap_within_the_noise_is_no_fault_of_the_engine(noise, name, severity):
    found = diagnose(case_of("engine", RUN, noise))
    assert (name, severity) in {(f.name, f.severity) for f in found}
    assert len({f.name for f in found} & {"rounding noise", "engine"}) == 1


@pytest.mark.parametrize("term", ["activations", "engine"])
def test_noise_of_rounded_activations_has_settings_that_mend_it(term, tmp_path):
    smooth = {"int8": True, "fp8-channel": True, "fp8": False}
    for format, pays in smooth.items():
        given = [f"rollout.format={format}", "model.type=pretrained", f"model.path={tmp_path}"]
        run = load(None, [*given, "rollout.smoothing=off"])
        found = diagnose(case_of(term, run, 0.18))
        (cause,) = (f for f in found if f.name in ("rounding noise", "quantization"))
        assert ("rollout.smoothing.alpha=0.5 or" in cause.change) == pays
        assert "rollout.format=int8-weight" in cause.change
        known = {"int8": "with it, with bf16 to 0.77", "fp8-channel": "with bf16 to 0.78"}
        assert known.get(format, "each leaves" if term == "engine" else "caps w") in cause.change


def test_what_coarse_weights_cost_is_closed_by_alignment():
    run = load(None, ["rollout.format=int4"])
    (cause,) = (f for f in diagnose(case_of("weights", run, 0.0)) if f.name == "quantization")
    assert cause.change.startswith("learner.precision=qarl, or an objective that caps w")


def test_staleness_in_bounds_is_a_note_until_few_samples_count():
    def examined(gap):
        n = 1000
        zeros = np.zeros(n)
        terms = np.zeros((n, len(TERMS)))
        terms[:, TERMS.index("staleness")] = gap
        whole = dict.fromkeys(("step", "lag", "position", "response"), zeros.astype(int))
        table = TokenTable(
            **whole,
            advantage=zeros,
            behavior=zeros - 1,
            proximal=zeros - 1 + gap,
            entropy=zeros + 1,
            terms=terms,
        )
        found = diagnose(Case(RUN, LogFacts(responses=n, tokens=n), table))
        return {f.name: f.severity for f in found}

    signs = 1 - 2 * (np.arange(1000) % 2)
    assert examined(0.1 * signs) == {"staleness": "note"}
    assert examined(0.9 * signs)["staleness"] == "warning"


@pytest.mark.parametrize(("left_out", "severity"), [(60.0, "error"), (5.0, "warning"), (0.0, None)])
def test_rewards_that_fail_are_found(tmp_path, left_out, severity):
    """Also of groups that are in no log, since too few of their responses had a score."""
    World(tmp_path / "run").play()
    counts = {"buffer/responses": 100.0, "buffer/reward_errors": left_out}
    counts["buffer/invalid/exception"] = left_out
    with MetricsLog(tmp_path / "run", tensorboard=False) as log:
        log.write("step", 1, {"reward/mean": 0.5, "reward/std": 0.5, **counts})
    found = examine(tmp_path / "run", None, None).findings
    assert [f.severity for f in found if f.name == "rewards fail"] == [severity] * bool(severity)
    assert not severity or found[0].says.startswith(f"the reward failed for {left_out:.0f} of 100")


def test_the_whole_run_is_judged_before_its_last_steps():
    """Where a run does not learn, a gap is a note; an engine that computes otherwise stays an error."""
    faults = [Fault("policy diverged", 1, "it did"), Fault("reward is flat", 9, "it is")]
    for term, severity in (("staleness", "note"), ("activations", "note"), ("engine", "error")):
        case = case_of(term, RUN, 0.0)
        alone, ruined = diagnose(case), diagnose(replace(case, faults=faults))
        assert [f.name for f in ruined[:2]] == [fault.name for fault in faults]
        assert (
            "learner.optimizer.lr" in ruined[0].change
            and ruined[1].change == "mend first: policy diverged"
        )
        assert {f.name for f in ruined[2:]} == {f.name for f in alone}
        assert {f.severity for f in ruined[2:]} <= {severity, "note"}
        assert ruined[2].severity == severity
        for finding in ruined[2:]:
            assert finding.severity == "error" or finding.change == "mend first: policy diverged"


def test_the_doctor_reads_why_the_run_does_not_learn(tmp_path):
    World(tmp_path / "run").play()
    with MetricsLog(tmp_path / "run", tensorboard=False) as log:
        for step in range(1, 30):
            values = {"reward/mean": 0.0, "reward/std": 0.0, "response/cut_off_share": 1.0}
            log.write("step", step, values)
    x = examine(tmp_path / "run", None, None)
    assert [f.name for f in x.findings] == ["responses cut off", "reward is flat"]


def test_a_run_without_a_step_says_where_to_look(tmp_path):
    (tmp_path / "config.toml").write_text(dump_toml(load(None, [])))
    with pytest.raises(LogError, match=r"no step is logged; see logs/learner\.log"):
        examine(tmp_path, None, None)


def test_without_a_checkpoint_the_log_alone_still_speaks(tmp_path):
    World(tmp_path / "run", draw="loops").play()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    x = examine(tmp_path / "run", None, None)
    assert "no checkpoint" in x.note and len(x.tokens) == 0
    assert "repetition" in names(x)


def test_what_is_no_run_is_one_line(tmp_path):
    with pytest.raises(LogError, match="no such run"):
        main(tmp_path / "gone")
