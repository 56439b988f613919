"""Turns with a tool: what is recorded is what the model saw, and only what it drew is learnt."""

import asyncio
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from helpers.engines import initial_version, responses, serving
from helpers.fixture_types import MakeRun
from helpers.policies import initial_model

from areal_q.config import CalculatorTool, Run, Sampling, ScriptedEngine, TorchEngine
from areal_q.errors import ConfigError
from areal_q.messages import Array, MessageDecoder, PartialResponse, Ticket, VersionSpan, encode
from areal_q.models.low_bit.engine_policy import engine_policy
from areal_q.tasks import GRADERS, CharTokenizer, Problem, build_task
from learner.backends.single_device import TorchPolicy
from learner.data.packing import Sample, pack_samples
from learner.measure.rescore import Scorer
from learner.policy_update import update_policy
from learner.publishing.version_builder import VersionBuilder
from rollout.engines import build_engine
from rollout.engines.base import Engine
from rollout.engines.scripted import scripted_engine
from rollout.environments.base import Response
from rollout.environments.calculator import Calculator
from rollout.environments.engine_client import EngineClient

TOOL = CalculatorTool(open="(", close=")", after=" ", max_calls=2)
CHARS = CharTokenizer()


def played(engine: Engine, run: Run, ticket: Ticket, tool: CalculatorTool = TOOL) -> list[Response]:
    async def work() -> list[Response]:
        async with serving(engine, initial_version(run)):
            return await responses(Calculator(EngineClient(engine, CHARS), tool), ticket)

    return asyncio.run(work())


def saying(*turns: str) -> Engine:
    """An engine that says `turns`, by how many results stand in what it is given."""

    def answer(prompt) -> list[int]:
        done = CHARS.decode(prompt).count(")")
        return CHARS.encode(turns[done])

    return scripted_engine(ScriptedEngine(), answer, lambda version: 1 - 1e-9)


@pytest.mark.parametrize(
    "turns, text, mask, reason",
    [
        (["(12+34)", "46"], "(12+34)46 46", "1111111000111", "stop"),
        (["(2+3)*(9/3)", "(9/3)", "8"], "(2+3)5 (9/3)3 8", "1111100111110011", "stop"),
        (["(2+)", "7"], "(2+)7", "111111", "stop"),
        (["(1/3)", "7"], "(1/3)7", "1111111", "stop"),
    ],
)
def test_the_tools_result_goes_in_with_mask_0(
    make_run: MakeRun, make_ticket: Callable[..., Ticket], turns, text, mask, reason
):
    ticket = make_ticket(
        group_size=1,
        sampling=Sampling(max_tokens=24),
        prompt_ids=Array.of(CHARS.encode("12+34="), "int32"),
    )
    (response,) = played(saying(*turns), make_run("model.max_positions=128"), ticket)
    assert CHARS.decode(response.ids) == text
    assert "".join(map(str, response.mask)) == mask
    assert response.finish_reason == reason
    assert sum(s.tokens for s in response.spans) == len(response.ids) == len(response.logprobs)


async def test_turns_cut_off_anywhere_go_on_as_if_nothing_had_happened(
    make_run: MakeRun, make_ticket: Callable[..., Ticket]
):
    """Cancelled again and again, each time after a few more tokens, on the way over a record and back."""
    run = make_run("model.max_positions=128")
    sampling = Sampling(max_tokens=40)
    ticket = make_ticket(group_size=3, sampling=sampling, seed=11)
    whole = await asyncio.to_thread(played, build_engine(TorchEngine(slots=8)), run, ticket)
    decode_partial_response = MessageDecoder(PartialResponse)
    async with serving(build_engine(TorchEngine(slots=8)), initial_version(run)) as engine:
        environment = Calculator(EngineClient(engine, CHARS), TOOL)
        pieces = [Response() for _ in range(3)]
        while not all(r.ended for r in pieces):
            before = engine.tokens_drawn
            task = asyncio.create_task(environment(ticket, pieces))
            while not task.done() and engine.tokens_drawn < before + 7:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            records = [decode_partial_response(encode(r.partial())) for r in pieces]
            pieces = [Response.of(record.validate(ticket)) for record in records]
    assert max(r.turns for r in whole) > 1
    for piece, want in zip(pieces, whole, strict=True):
        assert (piece.ids, piece.mask, piece.turns) == (want.ids, want.mask, want.turns)
        assert (piece.finish_reason, piece.spans) == (want.finish_reason, want.spans)
        np.testing.assert_allclose(piece.logprobs, want.logprobs, atol=1e-3)


def test_the_budget_counts_what_was_drawn_over_all_turns(
    make_run: MakeRun, make_ticket: Callable[..., Ticket]
):
    ticket = make_ticket(group_size=1, sampling=Sampling(max_tokens=8))
    (response,) = played(saying("(1+1)", "22222222"), make_run(), ticket)
    assert (CHARS.decode(response.ids), response.drawn) == ("(1+1)2 222", 8)
    assert response.finish_reason == "length"


def test_every_turns_log_probs_are_those_of_the_whole_recomputed(
    make_run: MakeRun, make_ticket: Callable[..., Ticket]
):
    """A random model calls now and then; its recorded numbers are the learner's of the recorded tokens."""
    run = make_run("rollout.sampling.max_tokens=20", "model.max_positions=128")
    ticket = make_ticket(group_size=64, sampling=run.rollout.sampling)
    responses = played(build_engine(TorchEngine(slots=64)), run, ticket)
    # A result is put in only after a well-formed call, so here the close alone is one turn.
    assert sum(r.turns > 1 for r in responses) > 5
    model = initial_model(run)
    version = VersionBuilder(run).build(model, 0)
    policy = engine_policy(model.config, version.tensors, run.rollout.format)
    samples = [sample(ticket, i, r) for i, r in enumerate(responses)]
    found, _ = Scorer(run.learner)(policy, samples, 1.0)
    mask = np.concatenate([r.mask for r in responses]) != 0
    recorded = np.concatenate([r.logprobs for r in responses])
    assert np.abs(found - recorded)[mask].mean() < 1e-3


def sample(ticket: Ticket, index: int, response: Response, advantage: float = 1.0) -> Sample:
    score = GRADERS[Run().task.grader].score(Problem("", "x"), "")
    return Sample(
        ticket=ticket.number,
        prompt_ids=ticket.prompt_ids.numpy(),
        trajectory=response.trajectory(index, score),
        advantage=advantage,
        lag=np.zeros(len(response.ids), np.int64),
    )


def test_nothing_is_learnt_from_what_the_tool_said(make_run: MakeRun, make_ticket):
    """Its log-probs, whatever they are, change no bit of a step; those of drawn tokens do."""
    run = make_run()
    ticket = make_ticket()

    def weights(tool_logprob: float, drawn_logprob: float = -1.0) -> torch.Tensor:
        torch.manual_seed(0)
        policy = TorchPolicy(initial_model(run), run.learner, 1.0)
        response = Response(
            ids=[4, 5, 6, 7],
            logprobs=[drawn_logprob, tool_logprob, tool_logprob, -2.0],
            mask=[1, 0, 0, 1],
            spans=[VersionSpan(0, 4, "a")],
        )
        samples = [sample(ticket, i, response, a) for i, a in enumerate([1.0, -0.5])]
        assert pack_samples(samples).mask.tolist() == [True, False, False, True] * 2
        update_policy(policy, samples)
        return torch.cat([p.detach().flatten() for p in policy.model.parameters()])

    assert torch.equal(weights(0.0), weights(-7.0))
    assert not torch.equal(weights(0.0), weights(0.0, drawn_logprob=-3.0))


def test_a_close_of_several_tokens_is_refused():
    with pytest.raises(ConfigError, match=r"close = '\)\)' is 2 tokens"):
        Calculator(
            EngineClient(scripted_engine(ScriptedEngine()), CHARS),
            msgspec.structs.replace(TOOL, close="))"),
        )


def test_the_task_demonstrates_the_call_and_judges_the_end(make_run: MakeRun):
    run = make_run("task.type=tool-calculator")
    score = GRADERS[run.task.grader].score
    problem = build_task(run.task).train[0]
    assert score(problem, problem.answer).correct
    call, _, result = problem.answer.rpartition(" ")
    assert call.endswith(f"){result}") and problem.prompt == call[1 : call.index(")")] + "="
    assert not score(problem, f"{call} 1{result}").correct
    assert not score(problem, "").correct


def test_only_the_last_turn_is_cut_after_its_stop():
    """A token may spell more than the stop string that it completes; what follows earlier stops was said."""
    response = Response(ids=CHARS.encode("1)2+3)4"), mask=[1, 1, 0, 0, 1, 1, 1])
    assert response.text(CHARS, Sampling(stop=(")",))) == "1)2+3)"
