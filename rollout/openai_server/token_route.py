"""`POST /inference/v1/generate`, vLLM's route: token ids in; token ids, log-probs and versions out."""

import base64
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct

from areal_q.errors import RecordError
from rollout.openai_server.replies import Reply
from rollout.openai_server.request_fields import WITHOUT_EFFECT, decoded_request
from rollout.openai_server.schema import NULL, CompletionBody, Told, decoded

_NOT_SAMPLING = ("model", "prompt", "stream", "stream_options")


class TokensBody(CompletionBody, kw_only=True):
    routed_experts_prompt_start: Annotated[int, Meta(ge=0)] = 0
    """Number of tokens at the beginning of the prompt whose experts are not told"""
    return_sampling_mask: bool = False
    """True if what each token was drawn from is to be told"""


class _Body(Struct):
    token_ids: list[Raw]
    sampling_params: dict[str, Raw] = {}
    model: str = ""


def decoded_tokens(data: bytes) -> CompletionBody:
    """Returns the request in `data` as one for a completion. Raises RecordError for a field, or one of
    `sampling_params`, that is not implemented or does not fit."""
    for name, raw in decoded(data, dict[str, Raw]).items():
        known = name in _Body.__struct_fields__ or name in WITHOUT_EFFECT
        if not known and bytes(raw) not in (b"null", b"false"):
            raise RecordError(f"`{name}` is not implemented")
    body = decoded(data, _Body)
    for name in _NOT_SAMPLING:
        if body.sampling_params.get(name, NULL) != NULL:
            raise RecordError(f"`{name}` is not implemented in sampling_params")
    fields = {**body.sampling_params, "prompt": body.token_ids, "model": body.model}
    return decoded_request(msgspec.json.encode(fields), TokensBody)


class TokenReply(Reply):
    """The answer to one request."""

    def __init__(self, body: TokensBody, *args: Any) -> None:
        super().__init__(body, *args)
        self._start = body.routed_experts_prompt_start
        self._tells_mask = body.return_sampling_mask

    def whole(self, told: list[Told]) -> dict[str, Any]:
        whole = super().whole(told)
        return {
            "request_id": self.id,
            "prompt_token_ids": whole["prompt_token_ids"],
            "usage": whole["usage"],
            "choices": [self._choice(one) for one in told],
        }

    def _choice(self, told: Told) -> dict[str, Any]:
        content = [
            {"token": f"token_id:{token}", "logprob": logprob}
            for token, logprob in zip(told.ids, told.logprobs, strict=True)
        ]
        routes, mask = told.routes, told.sampling_mask if self._tells_mask else None
        return {
            "index": told.index,
            "token_ids": told.ids,
            "finish_reason": told.finish_reason,
            "logprobs": {"content": content},
            "versions": told.versions,
            **({} if routes is None else {"routed_experts": _experts(routes, self._start)}),
            **({} if mask is None else {"sampling_mask": [ids.tolist() for ids in mask]}),
        }


def _experts(routes: np.ndarray, start: int) -> dict[str, Any]:
    """Returns the experts [N, L, K] of the tokens from number `start` on, as verifiers reads them: its bytes in
    base64, which come first, then what they are."""
    left = routes[start:]
    data = base64.b64encode(left.tobytes()).decode()
    return {"data": data, "shape": left.shape, "dtype": str(left.dtype), "start": start}
