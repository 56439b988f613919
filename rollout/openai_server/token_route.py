"""`POST /inference/v1/generate`, vLLM's route: token ids in; token ids, log-probs and versions out."""

from typing import Any

import msgspec
from msgspec import Raw, Struct

from areal_q.errors import RecordError
from rollout.openai_server.replies import Reply
from rollout.openai_server.request_fields import WITHOUT_EFFECT, decoded_request
from rollout.openai_server.schema import CompletionBody, Told, decoded

_NOT_SAMPLING = ("model", "prompt", "stream", "stream_options")


class _Body(Struct):
    token_ids: list[Raw]
    sampling_params: dict[str, Raw] = {}
    model: str = ""


def decoded_tokens(data: bytes) -> CompletionBody:
    """Returns the request in `data` as one for a completion. Raises RecordError for a field, or one of
    `sampling_params`, that is not implemented or does not fit."""
    for name, raw in decoded(data, dict[str, Raw]).items():
        known = name in _Body.__struct_fields__ or name in WITHOUT_EFFECT
        if not known and msgspec.json.decode(raw) not in (None, False):
            raise RecordError(f"`{name}` is not implemented")
    body = decoded(data, _Body)
    for name in _NOT_SAMPLING:
        if name in body.sampling_params:
            raise RecordError(f"`{name}` is not implemented in sampling_params")
    fields = {**body.sampling_params, "prompt": body.token_ids, "model": body.model}
    return decoded_request(msgspec.json.encode(fields), CompletionBody)


class TokenReply(Reply):
    """The answer to one request."""

    def whole(self, told: list[Told]) -> dict[str, Any]:
        whole = super().whole(told)
        return {
            "request_id": self.id,
            "prompt_token_ids": whole["prompt_token_ids"],
            "usage": whole["usage"],
            "choices": [_choice(one) for one in told],
        }


def _choice(told: Told) -> dict[str, Any]:
    content = [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(told.ids, told.logprobs, strict=True)
    ]
    return {
        "index": told.index,
        "token_ids": told.ids,
        "finish_reason": told.finish_reason,
        "logprobs": {"content": content},
        "versions": told.versions,
    }
