"""The torch engine's cache in pages: who owns them, and what is computed with them."""

import asyncio
import random
import resource
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engines import ask
from helpers.kinds import close_to, config_of
from helpers.policies import pack_state
from transformers import AutoModelForCausalLM

from areal_q.config import TorchEngine
from areal_q.config.engines import PAGE
from areal_q.errors import RecordError
from areal_q.models import Decoder, DecoderConfig, Experts, init_weights
from rollout.engines.base import Completion, Request
from rollout.engines.reference import torch_engine
from rollout.engines.reference.async_engine import Job
from rollout.engines.reference.inference_model import InferenceModel
from rollout.engines.reference.kv_cache import KVCache, PrefillAttention
from rollout.engines.reference.page_pool import NOTHING, PagePool, page_keys
from rollout.engines.reference.torch_engine import TorchStepper

SHAPE: dict[str, Any] = {
    "vocab_size": 29, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 160,
    "initializer_range": 0.25, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
MIXTURE = DecoderConfig(
    family="qwen3_moe", vocab_size=29, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48,
    max_positions=160, experts=Experts(count=4, per_token=2, mlp=16),
)  # fmt: skip


def model_of(seed: int, family: str = "qwen3") -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(family, SHAPE))
    with torch.no_grad():
        for name, p in model.named_parameters():
            # transformers sums in float32 by how much a state fades, which shows where it fades fast.
            p.copy_(p.bfloat16() / (4 if name.endswith("A_log") else 1))
    return model.eval()


def overflowing() -> Any:
    """Returns a model of finite weights, in which all values of attention are infinite or NaN."""
    model = model_of(0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.fill_(2.0**100)
            layer.input_layernorm.weight.fill_(2.0**100)
    return model


def load(stepper: TorchStepper, model: Any, version: int) -> None:
    weights = pack_state(model.state_dict(), model.config.to_dict(), "bf16", version)
    stepper.swap(stepper.prepare(weights))


def job_of(request: Request) -> Job:
    loop = asyncio.new_event_loop()
    job = Job(request, loop.create_future())
    loop.close()
    return job


def serve(stepper: TorchStepper, *requests: Request) -> list[list[Completion]]:
    jobs = [job_of(request) for request in requests]
    stepper.waiting.extend(jobs)
    while not all(job.future.done() for job in jobs):
        stepper.step()
    return [job.future.result() for job in jobs]


@torch.no_grad()
def check(models: list[Any], prompt: np.ndarray, done: Completion) -> None:
    """Compares each token's log-prob with a whole forward pass of the version that drew it."""
    ids = torch.tensor([[*prompt.tolist(), *done.response_ids.tolist()]])
    begin = 0
    for span in done.spans:
        logits = models[span.version](ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        want = logits.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
        part = slice(begin, begin + span.tokens)
        np.testing.assert_allclose(
            done.logprobs[part], want[part], atol=close_to(models[span.version])
        )
        begin += span.tokens


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tokens of each forward pass"""
    seen: list[int] = []
    forward = InferenceModel.forward

    def counting(self: InferenceModel, tokens: Any, *rest: Any) -> Any:
        seen.append(len(tokens))
        return forward(self, tokens, *rest)

    monkeypatch.setattr(InferenceModel, "forward", counting)
    return seen


@pytest.mark.parametrize("seed", range(20))
def test_a_page_belongs_to_its_owners_alone(seed: int) -> None:
    """A random walk beside a count of owners and of what was written where."""
    dice, pool = random.Random(seed), PagePool(40)
    owners, held, content = Counter[int](), list[list[int]](), dict[int, bytes]()
    for step in range(600):
        move, free = dice.random(), 40 - len(owners)
        if move < 0.4 and free:
            pages = pool.take(dice.randint(1, min(free, 6)))
            assert not owners.keys() & set(pages) and NOTHING not in pages
            content |= {page: b"%d %d" % (step, page) for page in pages}
            held.append(pages)
            owners.update(pages)
        elif move < 0.6 and held:
            pages = pool.share(dice.choice(held)[: dice.randint(1, 3)])
            held.append(pages)
            owners.update(pages)
        elif move < 0.7 and held:
            for page in dice.choice(held):
                pool.know(content[page], page)
        elif move < 0.8 and content:
            key = dice.choice([*content.values()])
            if (page := pool.find(key)) is not None:
                assert content[page] == key
                held.append([page])
                owners.update([page])
        elif move < 0.81:
            pool.forget()
            assert not any(pool.find(key) for key in content.values())
        elif held:
            pages = held.pop(dice.randrange(len(held)))
            pool.release(pages)
            owners = +(owners - Counter(pages))
        assert pool.owned == len(owners) and pool.size <= 41
    for pages in held:
        pool.release(pages)
    assert pool.owned == 0 and sorted(pool.take(40)) == [*range(1, 41)]
    with pytest.raises(MemoryError, match="40 pages"):
        pool.take(1)


def test_keys_tell_all_tokens_up_to_a_pages_end() -> None:
    ids = np.arange(3 * PAGE + 5, dtype=np.int32)
    keys = page_keys(ids)
    assert len({*keys}) == 3 and page_keys(ids, keys[:2]) == keys == page_keys(ids.astype(np.int64))
    other = ids.copy()
    other[PAGE] += 1
    assert [a == b for a, b in zip(keys, page_keys(other), strict=True)] == [True, False, False]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
@pytest.mark.parametrize("seed", range(6))
def test_log_probs_are_those_of_whole_passes_in_any_walk(seed: int, family: str) -> None:
    """Prompts that begin alike by chance, pieces of a page or two, new weights between pieces, requests that
    are cancelled, and a cache that has no room for all. One of the second family's layers keeps a state."""
    dice = random.Random(seed)
    models = [model_of(i, family) for i in range(4)]
    page_bytes = (2 if family == "qwen3" else 1) * 2 * 2 * PAGE * 8 * 4
    config = TorchEngine(
        slots=7, kv_on_update="recompute", kv_cache_bytes=25 * page_bytes, fused=seed % 2 == 0,
        prefill_tokens=dice.choice([PAGE, 2 * PAGE, 128]),
    )  # fmt: skip
    stepper = TorchStepper(config)
    load(stepper, models[0], 0)
    known, jobs, waited = [np.zeros(0, np.int64)], list[Job](), False
    for step in range(150):
        if step < 60 and dice.random() < 0.5:
            begin = dice.choice(known)[: dice.randint(0, 90)].tolist()
            prompt = [*begin, *(dice.randrange(29) for _ in range(dice.randint(1, 30)))]
            known.append(np.array(prompt))
            max_tokens = dice.randint(1, 30)
            jobs.append(job_of(ask(prompt, dice.randint(1, 3), step, max_tokens=max_tokens)))
            stepper.waiting.append(jobs[-1])
        if dice.random() < 0.04 and jobs:
            stepper.drop(jobs.pop(dice.randrange(len(jobs))))
        if step in (20, 35, 50):
            version = stepper.version + 1
            load(stepper, models[version], version)
        rows = len(stepper.rows)
        drawn = stepper.step()
        assert drawn >= rows
        waited |= bool(stepper.waiting) and stepper.active < 5
        assert stepper.cache.pool.size <= 26
    while stepper.active or stepper.waiting:
        stepper.step()
    for job in jobs:
        for done in job.future.result():
            check(models, job.request.prompt_ids, done)
            known.append(np.concatenate((job.request.prompt_ids, done.response_ids)))
    assert waited and stepper.cache.pool.owned == 0


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("mixture", [False, True])
def test_a_turn_computes_only_what_is_new(mixture: bool, cache: Any, computed: list[int]) -> None:
    """Against the same prompt after a swap, which computes it whole; routes of a mixture are those too."""
    model: Any = model_of(0)
    weights = pack_state(model.state_dict(), model.config.to_dict())
    if mixture:
        sparse = Decoder(MIXTURE)
        init_weights(sparse, 0)
        weights = pack_state(sparse.state_dict(), MIXTURE.to_hf())
    stepper = TorchStepper(TorchEngine(slots=8, kv_cache=cache))
    stepper.swap(stepper.prepare(weights))
    ((turn, *_),) = serve(stepper, ask(range(1, 21), 3, max_tokens=20))
    assert computed == [20, *[3] * 19]
    prompt = [*range(1, 21), *turn.response_ids.tolist(), 7, 8, 9]
    computed.clear()
    ((later,),) = serve(stepper, ask(prompt, 1, 5, max_tokens=9))
    assert computed == [43 - 39 // PAGE * PAGE, *[1] * 8]
    stepper.swap(stepper.prepare(weights))
    computed.clear()
    ((anew,),) = serve(stepper, ask(prompt, 1, 5, max_tokens=9))
    assert computed == [43, *[1] * 8]
    assert cache == "fp8" or later.response_ids.tolist() == anew.response_ids.tolist()
    far = 1e-4 if cache == "auto" else 0.3  # the scales are of other tokens
    np.testing.assert_allclose(later.logprobs[0], anew.logprobs[0], atol=far)
    if cache == "auto" and mixture:
        assert later.routes is not None and anew.routes is not None
        np.testing.assert_array_equal(later.routes, anew.routes)
    elif cache == "auto":
        check([model], np.array(prompt), later)


@pytest.mark.slow
def test_a_prompt_of_32k_tokens_is_computed_once_in_pieces(
    computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For two responses and the next turn; scores of all pairs would be 4 GB."""
    monkeypatch.setitem(SHAPE, "max_position_embeddings", 1 << 15)
    model, prompt = model_of(0), np.random.default_rng(0).integers(0, 29, 32_000)
    stepper = TorchStepper(TorchEngine(slots=8, prefill_tokens=1024))
    load(stepper, model, 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ((done, _),) = serve(stepper, ask(prompt, 2, max_tokens=16))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # kB
    assert computed == [1024] * 31 + [256] + [2] * 15
    check([model], prompt, done)
    computed.clear()
    turn = [*prompt.tolist(), *done.response_ids.tolist(), 1, 2, 3]
    ((later,),) = serve(stepper, ask(turn, 1, max_tokens=8))
    assert computed == [32_019 - 32_015 // PAGE * PAGE, *[1] * 7]
    check([model], np.array(turn), later)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("update", ["keep", "recompute"])
@pytest.mark.parametrize(("cache", "fused"), [("auto", True), ("auto", False), ("fp8", True)])
def test_weights_that_overflow_spoil_no_later_request(
    cache: Any, fused: bool, update: Any, fails: bool
) -> None:
    """A group and a long prompt that is half computed are given up, at once or after a row of the group has
    failed; what they wrote lies in the pages that the next requests, of good weights, are given."""
    good, bad = model_of(0), overflowing()
    config = TorchEngine(
        slots=8, prefill_tokens=PAGE, kv_cache=cache, fused=fused, kv_on_update=update
    )
    stepper = TorchStepper(config)
    load(stepper, good, 0)
    group = job_of(ask(range(1, 21), 3, max_tokens=40))
    stepper.waiting.append(group)
    for _ in range(4):
        stepper.step()
    load(stepper, bad, 1)
    long = job_of(ask([5, 6] * 60, 2, max_tokens=4))
    stepper.waiting.append(long)
    for _ in range(3):
        stepper.step()
    if fails:
        with torch.inference_mode():
            stepper._finish([1])
        # A page in FP8 keeps the scale that it was begun with, so that what is larger saturates.
        saturates = cache == "fp8" and update == "keep"
        assert saturates or "not finite" in str(group.future.exception())
    stepper.drop(group)
    stepper.drop(long)
    assert stepper.cache.pool.owned == 0
    load(stepper, good, 2)
    prompts = [[8, *[9] * size] for size in (3, 20, 39)]
    for prompt, (done,) in zip(
        prompts, serve(stepper, *(ask(p, 1, 3, max_tokens=20) for p in prompts)), strict=True
    ):
        if cache == "auto":
            check([good] * 3, np.array(prompt), done)


def test_fp8_scales_that_overflow_go_with_their_weights() -> None:
    """A row whose page has the scales of good weights goes on into a page that is begun after the bad ones."""
    stepper = TorchStepper(TorchEngine(slots=8, kv_cache="fp8"))
    load(stepper, model_of(0), 0)
    job, other = job_of(ask(range(1, 21), 1, max_tokens=30)), job_of(ask([5] * 9, 1, max_tokens=9))
    for version, (model, new) in enumerate([(model_of(0), job), (overflowing(), other)]):
        load(stepper, model, version)
        stepper.waiting.append(new)
        stepper.step()
    stepper.drop(other)
    load(stepper, model_of(0), 2)
    while not job.future.done():
        stepper.step()
    assert [span.version for span in job.future.result()[0].spans] == [0, 1, 2]


def test_a_long_prompt_does_not_widen_many_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of a long prompt, and a group of it after a swap: each piece reads as many pages as the
    longest. Short prompts alone are computed together."""
    read: list[tuple[int, int]] = []

    class Watched(PrefillAttention):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            read.append((len(self.pages), self.pages.shape[1]))

    monkeypatch.setattr(torch_engine, "PrefillAttention", Watched)
    config = TorchEngine(slots=64, prefill_tokens=PAGE, kv_on_update="recompute")
    stepper, short = TorchStepper(config), [ask([i], 1, max_tokens=1) for i in range(1, 16)]
    load(stepper, model_of(0), 0)
    serve(stepper, ask([17], 1, max_tokens=1), *short)
    assert read == [(16, 1)]
    long = job_of(ask([3] * 129, 16, max_tokens=9))
    stepper.waiting.append(long)
    for _ in range(8):
        stepper.step()
    for request in short:
        stepper.waiting.append(job_of(request))
    stepper.step()
    stepper.step()
    load(stepper, model_of(1), 1)
    while not long.future.done():
        stepper.step()
    assert max(pieces * pages for pieces, pages in read) <= PAGE
    for done in long.future.result():
        check([model_of(0), model_of(1)], long.request.prompt_ids, done)


@pytest.mark.parametrize("size", [19, 32])
def test_groups_take_the_pages_of_their_rows_at_once(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each taking is a few tensor operations, whatever it takes; here one for each of two prompts."""
    taken: list[int] = []
    take = KVCache.take

    def counting(self: KVCache, count: int) -> list[int]:
        taken.extend([count] if count else [])
        return take(self, count)

    monkeypatch.setattr(KVCache, "take", counting)
    stepper = TorchStepper(TorchEngine(slots=64))
    load(stepper, model_of(0), 0)
    stepper.waiting.extend(job_of(ask([i] * size, 20, max_tokens=9)) for i in range(2))
    stepper.step()
    assert taken == [2, 2, *([2 * 19] if size % PAGE else [])]


def test_prompts_that_wait_for_a_swap_share_pages(computed: list[int]) -> None:
    """The first two have pages of before the swap and go on by themselves, the second with 32 tokens of the
    first; the seven whose turn comes after it share."""
    stepper = TorchStepper(TorchEngine(slots=64, prefill_tokens=2 * PAGE))
    load(stepper, model_of(0), 0)
    common = [*range(1, 28)] * 4
    jobs = [job_of(ask([*common[:96], i, 2], 1, max_tokens=1)) for i in range(9)]
    stepper.waiting.extend(jobs)
    stepper.step()
    assert computed == [2 * PAGE] and len(stepper.prompts.open) == 9
    load(stepper, model_of(1), 1)
    while stepper.prompts.open:
        stepper.step()
    assert sum(computed) == 98 + (98 - 32) + 98 + 6 * 2


def test_a_failure_lets_no_page_be_found() -> None:
    """A request that overflows by itself, and one that begins alike, under the same weights."""
    model = model_of(0)
    stepper = TorchStepper(TorchEngine(slots=8))
    load(stepper, model, 0)
    job, prompt = job_of(ask(range(1, 21), 2, max_tokens=9)), [*range(1, 21), 3]
    stepper.waiting.append(job)
    stepper.step()
    page = stepper.rows[0].pages[0]
    with torch.inference_mode():
        stepper.cache.layers[1][1, :, page] = torch.inf
    while not job.future.done():
        stepper.step()
    assert "not finite" in str(job.future.exception())
    ((done,),) = serve(stepper, ask(prompt, 1, 3, max_tokens=9))
    check([model], np.array(prompt), done)


def test_rows_draw_while_a_long_prompt_is_computed(computed: list[int]) -> None:
    model = model_of(0)
    stepper = TorchStepper(TorchEngine(slots=8, prefill_tokens=2 * PAGE))
    load(stepper, model, 0)
    short, long = job_of(ask([1, 2], 1, max_tokens=30)), job_of(ask([3] * 129, 2, max_tokens=4))
    late = job_of(ask([5] * 9, 1, max_tokens=4))
    stepper.waiting.append(short)
    stepper.step()
    stepper.waiting.extend([long, late])
    computed.clear()
    while not long.future.done():
        assert stepper.step()
    assert late.future.done() and max(computed) == 2 * PAGE + 2
    for job in (long, late):
        check([model], job.request.prompt_ids, job.future.result()[0])


def test_a_request_beyond_the_cache_is_refused_by_name() -> None:
    stepper = TorchStepper(TorchEngine(slots=8, kv_cache_bytes=4 * 2 * 2 * 2 * PAGE * 8 * 4))
    load(stepper, model_of(0), 0)
    stepper.check_request(ask([1] * 40, 1, max_tokens=25))
    with pytest.raises(RecordError, match="5 pages of 16 tokens exceeds the 4 of kv_cache_bytes"):
        stepper.check_request(ask([1] * 40, 1, max_tokens=26))
