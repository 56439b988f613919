"""What msgspec refuses is told in our own words, wherever data come in: place, what is there, what could be."""

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.paths import ROOT

from areal_q.config import load
from areal_q.decode_errors import in_words
from areal_q.errors import AReaLQError
from areal_q.messages.codec import decode_ticket
from areal_q.models import DecoderConfig
from areal_q.observability.metrics_log import read_metrics
from areal_q.tasks.datasets.jsonl_rows import read_rows
from learner.checkpoint.files import STATE, read_state
from rollout.openai_server.request_fields import decoded_request
from rollout.openai_server.schema import ChatBody, RewardBody, decoded

FOREIGN = ("Expected `", "Invalid ", "malformed", "truncated", "required field", "`$", "at `")
SIZES = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1,
    "intermediate_size": 4, "max_position_embeddings": 8,
}  # fmt: skip


def refusal(decode: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(AReaLQError) as refused:
        decode(*args)
    said = str(refused.value)
    assert not [words for words in FOREIGN if words in said], said
    return said


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("learner.max_lag=two", "learner.max_lag = 'two': must be a whole number, not text"),
        ("rollout.sampling.stop=['']", "rollout.sampling.stop[0] = '': must be text of at least 1"),
        ("rollout.sampling.stop=[['a']]", "stop[0][0] = 'a': must be a whole number, not text"),
        ("rollout.format=int7", "rollout.format = 'int7': no such choice; did you mean 'int8'?"),
        ("task.type=jsonl", "task.path is missing: task.type = 'jsonl' needs it"),
        (
            "learner.objective.pth=x",
            "learner.objective.cap?; of your own: learner.objective.path=FILE",
        ),
        ("learner.advantage.type=x", "reinforce++, rloo; of your own: learner.advantage.path=FILE"),
        ("learner.groups=1" + "0" * 21, "must be a whole number, at most 100000"),
    ],
)
def test_settings_are_refused_in_our_words(setting: str, said: str):
    assert said in refusal(load, None, [setting])


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        (RewardBody, {"failed": "boredom"}, "failed = 'boredom': no such choice; it is one of env"),
        (RewardBody, {"reward": "1"}, "reward = '1': must be a number or nothing, not text"),
        (
            RewardBody,
            {"reward": 1, "parts": {"a b": 1}},
            "the keys of parts: must be text that mat",
        ),
        (RewardBody, {"reward": 1, "parts": {"a": "b"}}, "parts[...]: must be a number, not text"),
        (RewardBody, {}, "an episode ends with either"),
        (RewardBody, [1], "must be a table, not a list"),
        (ChatBody, {}, "messages is missing"),
        (ChatBody, {"messages": []}, "messages = []: must be a list of at least 1"),
        (ChatBody, {"messages": [{"role": "boss"}]}, "messages[0].role = 'boss': no such choice"),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type = 'image_url': no such choice; it is one of text",
        ),
        (
            ChatBody,
            {"messages": [{"role": "user", "tool_calls": [1]}]},
            "messages[0].tool_calls[0] = 1: must be a table",
        ),
    ],
)
def test_requests_are_refused_in_our_words(kind: Any, body: object, said: str):
    data = json.dumps(body).encode()
    assert said in refusal(decoded_request if kind is ChatBody else decoded, data, kind)


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"x", "not JSON: invalid character"), (b"{", "it ends too early")],
)
def test_what_is_no_json_is_refused_in_our_words(data: bytes, said: str, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_bytes(b"\n" + data)
    (tmp_path / STATE).write_bytes(data)
    (tmp_path / "metrics.jsonl").write_bytes(data + b"\n")
    assert said in refusal(decoded, data, RewardBody)
    where = refusal(read_rows, str(tmp_path / "rows.jsonl"))
    assert f"rows.jsonl:2: {said}" in where and "it takes JSON lines" in where
    assert f"{STATE}: {said}" in refusal(read_state, tmp_path)
    assert f"line 1: {said}" in refusal(read_metrics, tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode({"type": "x"})])
def test_records_are_refused_in_our_words(data: bytes):
    refusal(decode_ticket, data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": "4"}, "hidden_size = '4': must be a whole number, not text"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: must be a whole number, at least 1"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id[0] = '</s>': must be a whole number, not text"),
    ],
)
def test_a_models_sizes_are_refused_in_our_words(change: dict[str, Any], said: str):
    DecoderConfig.from_hf(SIZES)
    assert refusal(DecoderConfig.from_hf, SIZES | change) == said


def test_words_of_a_type_itself_are_kept():
    class Even(msgspec.Struct):
        n: int

        def __post_init__(self) -> None:
            if self.n % 2:
                raise ValueError("it is odd")

    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert({"a": [{"n": 1}]}, dict[str, list[Even]])
    assert in_words(refused.value) == "[...][0]: it is odd"


def test_every_handler_of_msgspecs_errors_translates_them():
    """Or passes on nothing of them."""
    found = []
    for package in ("areal_q", "buffer", "rollout", "learner"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ExceptHandler) and node.type and node.name:
                    body = "\n".join(map(ast.unparse, node.body))
                    uses = f"{{{node.name}" in body or f"str({node.name})" in body
                    if "msgspec" in ast.unparse(node.type) and uses:
                        found.append(f"{path}:{node.lineno}")
    assert found == []
