"""A learner and a rollout from Python: the loop's own steps, and completions that they can learn from."""

import runpy
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers.kinds import write_foreign
from helpers.openai_server.scripted import World
from helpers.paths import ROOT

import areal_q
from areal_q.config import load
from areal_q.errors import CheckpointError, ConfigError, RecordError, UserError
from areal_q.models import PackedLayout, load_decoder
from buffer.logs.step_log import iter_steps
from learner import checkpoint
from learner.replay.replay_steps import Replay

TINY: dict[str, Any] = {
    "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "mlp": 48},
    "learner.groups": 4,
    "learner.group_size": 2,
    "rollout.sampling.max_tokens": 4,
    "warmstart.steps": 2,
    "checkpoint.every": 2,
    "checkpoint.keep": 9,
}
OWN = """
def objective(x, scale=1.0):
    ratio = x.log_ratio.exp()
    weight = x.log_mismatch.exp().clamp(max=2.0)
    low, high = ratio.clamp(0.8, 1.2), x.advantages
    return scale * weight * (ratio * high).minimum(low * high)
"""


def drawn(ids: list[int], version: int = 0) -> areal_q.Completion:
    return areal_q.Completion([4, 5], ids, [-3.1] * len(ids), [version] * len(ids), "", "stop")


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_what_is_rewarded_becomes_more_probable(tmp_path: Path, dtype: str, rounding: float):
    """The one response that is rewarded, beside three others to the same prompt."""
    own = {"warmstart.steps": 0, "learner.minibatches": 1, "learner.dtype": dtype}
    learner = areal_q.Learner(settings=TINY | own)
    group = areal_q.group([drawn([6, 7]), drawn([8, 9]), drawn([10, 11]), drawn([3])], [1, 0, 0, 0])

    @torch.no_grad()
    def logprobs(ids: list[int]) -> float:
        """Of a response to [4, 5]."""
        inputs = torch.tensor([4, 5, *ids[:-1]])
        hidden = learner.model(inputs, PackedLayout.of([len(inputs)]))[1:]
        out = learner.model.logits(hidden)
        return out.log_softmax(-1)[range(len(ids)), ids].sum().item()

    before = logprobs([6, 7]), logprobs([8, 9])
    metrics = learner.step([group])
    assert metrics["reward/mean"] == 0.25 and metrics["lag/max"] == 0
    assert learner.version == 1
    assert logprobs([6, 7]) > before[0] and logprobs([8, 9]) < before[1]
    # The model that is saved computes the same, without the rescaling of learner.uaq.
    before = logprobs([6, 7]), logprobs([8, 9])
    saved = load_decoder(learner.save(tmp_path / "hf"))
    learner.model.load_state_dict(saved.state_dict())
    assert (logprobs([6, 7]), logprobs([8, 9])) == pytest.approx(before, abs=rounding)
    assert learner.step([group])["lag/max"] == 1


def test_what_cannot_be_learnt_is_refused_by_name():
    learner = areal_q.Learner(settings=TINY | {"warmstart.steps": 0})
    for groups, said in (
        ([], "no response to learn from"),
        ([areal_q.group([drawn([99])], [1.0])], "outside of"),
        ([areal_q.group([drawn([3] * 300)], [1.0])], "tokens with the prompt"),
    ):
        with pytest.raises(RecordError, match=said):
            learner.step(groups)
    for completions, rewards, said in (
        ([drawn([])], [1.0], "empty response"),
        ([], [], "0 responses and 0 rewards: a group"),
        ([drawn([3])], [1.0, 0.0], "1 responses and 2 rewards: a group"),
    ):
        with pytest.raises(RecordError, match=said):
            areal_q.group(completions, rewards)
    assert learner.version == 0


@pytest.mark.parametrize(
    ("family", "inner"),
    [("stablelm", "intermediate_size"), ("gemma3_text", "intermediate_size"), ("gpt2", "n_inner")],
)
def test_settings_that_no_run_of_a_model_has_are_refused(family: str, inner: str, tmp_path: Path):
    """UAQ changed what the first computes, and ended with a traceback in each of the others."""
    net = write_foreign(tmp_path, family, **{inner: 33})
    plain = {"warmstart.steps": 0, "learner.dtype": "float32", "rollout.format": "bf16"}
    with pytest.raises(ConfigError, match=rf"^learner\.uaq = 1\.5: not with {family}, .*uaq = 1$"):
        areal_q.Learner(tmp_path, settings=plain)
    plain["learner.uaq"] = 1
    with pytest.raises(ConfigError, match=r"^rollout\.format = 'mxfp4': .* 33 inputs"):
        areal_q.Learner(tmp_path, settings=plain | {"rollout.format": "mxfp4"})
    model = areal_q.Learner(tmp_path, settings=plain).model
    ids = torch.tensor([3, 1, 4, 1, 5])
    with torch.no_grad():
        found = model.logits(model(ids, PackedLayout.of([len(ids)])))
        torch.testing.assert_close(found, net(ids[None]).logits[0], atol=1e-3, rtol=1e-3)


async def test_what_was_drawn_is_learnt_as_it_was_drawn(tmp_path: Path):
    """At its temperature, of the tokens that were not left out: the same weights differ by rounding alone."""
    cold = {"rollout.sampling.temperature": 0.4, "warmstart.steps": 0, "rollout.format": "bf16"}
    learner = areal_q.Learner(settings=TINY | cold)
    warm = areal_q.Learner(settings=TINY | {"warmstart.steps": 0})
    async with areal_q.Rollout(learner.save(tmp_path / "base")) as rollout:
        for more in ({}, {"top_k": 3}):
            (found,) = await rollout.generate(["12+34="], n=8, seed=1, temperature=0.4, **more)
            group = areal_q.group(found, [1.0, *[0.0] * 7])
            with pytest.raises(RecordError, match=r"at temperature 0.4.*temperature = 1$"):
                warm.step([group])
            assert learner.step([group])["mismatch/kl_k3"] < 1e-3
            await rollout.load(learner)
        (found,) = await rollout.generate(["12+34="], n=2, temperature=0.4, top_p=0.5)
    with pytest.raises(RecordError, match="top_k of at most 512"):
        areal_q.group(found, [1.0, 0.0])


def test_messages_to_a_model_are_its_templates(byte_tokenizer: Path, tmp_path: Path):
    """Its directory says nothing of a task, whose template a run would name."""
    talk = [{"role": "user", "content": "hi"}]
    side: Any = cast(Any, areal_q.Rollout(byte_tokenizer))._side
    assert side.tokenizer.decode(side._encoded(talk)[0]) == "<hi>"
    assert side.tokenizer.decode(side._encoded("hi")[0]) == "hi"
    shutil.copytree(byte_tokenizer, tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template"):
        cast(Any, areal_q.Rollout(tmp_path / "bare"))._side._encoded(talk)


async def test_an_endpoint_gives_what_its_engine_drew(
    tmp_path: Path, make_ticket: Any, dead_proxy: None
):
    here = World(tmp_path, make_ticket, ["so it is", "é"])
    async with here.served(), areal_q.Rollout(here.url) as rollout:
        talk = [{"role": "user", "content": "how?"}]
        ((first,),) = await rollout.generate(["what?"], max_tokens=50)
        ((second,),) = await rollout.generate([talk], max_tokens=50)
        with pytest.raises(ConfigError, match="hotness"):
            await rollout.generate(["what?"], hotness=1)
        with pytest.raises(ConfigError, match="from its learner alone"):
            await rollout.load(areal_q.Learner(settings=TINY | {"warmstart.steps": 0}))
    for completion, (prompt, ids) in zip((first, second), here.engine.drawn, strict=True):
        assert (completion.prompt_ids, completion.ids) == (prompt, ids)
        assert completion.versions == [3] * len(ids)
        assert completion.logprobs == [-0.5] * len(ids)
    assert (first.text, second.text) == ("so it is", "é")
    group = areal_q.group([first], [1.0])
    assert group.trajectories[0].response_ids.numpy().tolist() == first.ids


GIVEN: dict[str, Any] = {
    "task.template": "chat",
    "task.chat": {"system": "Be brief 😀, é and \x7f"},
    "rollout.serve": None,
    "rollout.sampling.stop": ["🛑", [12, 7]],
    "trackers": [{"type": "wandb", "project": "p"}],
}


def is_as_given(overrides: Any) -> bool:
    model = ("model", {"type": "pretrained", "path": "m"})
    return load(None, [model, *overrides]) == load(None, [model, *GIVEN.items()])


def test_settings_of_any_value_arrive_as_they_are(
    tmp_path: Path, byte_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
):
    """A command's texts have no None, and JSON's \\ud83d is no TOML."""
    taken: list[Any] = []
    monkeypatch.setattr("rollout.evaluation.evaluate.main", lambda *a, **_: taken.append(a[1]))
    monkeypatch.setattr("learner.replay.cli.main", lambda *a: taken.append(a[3]))
    monkeypatch.setattr("learner.api.steps.Steps.of_run", lambda *a: taken.append(a[2]))
    areal_q.evaluate("runs/r", settings=GIVEN)
    areal_q.replay("runs/r", settings=GIVEN)
    areal_q.Learner.at("runs/r", settings=GIVEN)
    assert len(taken) == 3 and all(map(is_as_given, taken))
    there = tmp_path / "a model 😀"
    shutil.copytree(byte_tokenizer, there)
    rollout: Any = areal_q.Rollout(there, settings=GIVEN)
    run = rollout._side.run
    assert run.model.path == str(there) and run.task.chat.system == GIVEN["task.chat"]["system"]


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_learner_repeats_a_runs_steps_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """From its log: with the run's own settings as recorded, with another loss as in a replay."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN)
    # A power of two: what is exported is, bit for bit, what the learner publishes.
    settings = TINY | {"learner.uaq": 2}
    run = areal_q.train(steps=4, name="r", settings=settings, progress=False)
    recorded = {r.step: r.metrics for r in iter_steps(run.directory / "steps", 0)}
    learner = areal_q.Learner.at(run)
    for step, groups in areal_q.logged(run):
        found = learner.step(groups)
        assert {k: v for k, v in recorded[step].items() if k in found} == found
    last = run.directory / "checkpoints" / "step-000004"
    want = checkpoint.read_tensors(last, checkpoint.read_state(last))
    for name, found in learner.weights().items():
        assert any(torch.equal(found, w) for n, w in want.items() if n.endswith(name)), name
    ahead = Replay(run.directory, ["learner.objective.path=mine.py"], 2)
    own = areal_q.Learner.at(run, 2, objective="mine.py")
    for replayed, (_, groups) in zip(ahead.steps(), areal_q.logged(run, 2), strict=True):
        assert own.step(groups) == replayed.metrics
    with pytest.raises(CheckpointError, match="none of step 3; the one before is of 2"):
        areal_q.Learner.at(run, 3)
    async with areal_q.Rollout(run) as rollout:
        ((one, same), _) = await rollout.generate(["1+2=", "3+4="], n=2, temperature=0, seed=1)
        assert one == same and one.versions == [0] * len(one.ids)
        await rollout.load(learner)
        ids: Any = np.array(one.prompt_ids)
        for prompt in (ids, [ids[0], *ids[1:]], ids.tolist(), "1+2="):
            for asked in ([prompt], prompt):
                ((again,),) = await rollout.generate(asked, temperature=0, seed=1)
                assert again.ids == one.ids, "it was another prompt, or several"
        ((other,),) = await rollout.generate(["1+2="], temperature=0)
        assert other.versions == [4] * len(other.ids) and other.ids == one.ids
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-5)


EXAMPLE = ROOT / "docs" / "examples" / "own_loop.py"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_loop_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("loop.py").write_text(EXAMPLE.read_text("utf-8").replace("200", "2").replace("(5)", "(2)"))
    runpy.run_path("loop.py", run_name="__main__")
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1", "2"]
    assert f"```python\n{EXAMPLE.read_text('utf-8')}```" in (ROOT / "docs" / "api.md").read_text()
