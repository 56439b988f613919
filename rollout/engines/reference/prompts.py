"""Prompts on their way into the KV cache: piece by piece, taking turns, and no page of them computed twice."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from areal_q.config.engines import PAGE, pages_of
from rollout.engines.reference.async_engine import Job
from rollout.engines.reference.kv_cache import KVCache, PromptPiece, States


@dataclass(eq=False)
class Prompt:
    """A prompt that is not computed yet, or not to its end."""

    job: Job
    keys: list[bytes]
    """Keys of its whole pages, but for one that ends with its last token: that is computed anyway, since its
    logits are needed."""
    age: int = -1
    """PagePool.age when its first page was taken. Pages of several versions are not shared."""
    pages: list[int] = field(default_factory=list)
    done: int = 0
    """Number of tokens whose keys and values are in the cache"""
    states: States | None = None
    """What layers that keep a state have of these tokens; None without such layers, and once responses begin"""


class Pass:
    """Pieces of prompts for one forward pass, which pads all to the longest of them, and reads as many pages
    for each as for the one that ends last. It has at most `most_tokens` of either, or one piece."""

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.pieces: list[PromptPiece] = []
        self._widest = self._furthest = 0

    def takes(self, piece: PromptPiece) -> bool:
        """Adds `piece` if there is room. Returns whether there was."""
        widest = max(self._widest, len(piece.ids))
        furthest = max(self._furthest, piece.start + len(piece.ids))
        size = (len(self.pieces) + 1) * max(widest, pages_of(furthest))
        # A state that a piece leaves behind is there for the next one only in the next pass.
        follows = piece.states and any(other.states is piece.states for other in self.pieces)
        if self.pieces and (size > self.most_tokens or follows):
            return False
        self.pieces.append(piece)
        self._widest, self._furthest = widest, furthest
        return True


class PromptQueue:
    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        """Most tokens of a forward pass, a multiple of PAGE"""
        self.open: deque[Prompt] = deque()
        """Those that are not computed to their end, the next one first"""

    def next_pieces(self, cache: KVCache) -> tuple[list[PromptPiece], list[Prompt]]:
        """Returns the next pieces of as many prompts as fit into a forward pass, and those prompts that end
        with them, whose pieces come last. Prompts that do not end take turns."""
        together = Pass(self.most_tokens)
        begun, ready = dict[Prompt, PromptPiece](), dict[Prompt, PromptPiece]()
        while self.open:
            prompt = self.open[0]
            _reuse(cache, prompt)
            ids, start = prompt.job.request.prompt_ids, prompt.done
            end = min(len(ids), start + self.most_tokens)
            piece = PromptPiece(ids[start:end], start, prompt.pages, prompt.states)
            if not together.takes(piece):
                break
            self.open.popleft()
            prompt.pages += cache.take(pages_of(end) - len(prompt.pages))
            prompt.done = end
            know(cache, prompt, prompt.keys[: end // PAGE], prompt.pages)
            (ready if end == len(ids) else begun)[prompt] = piece
        self.open += begun
        return [*begun.values(), *ready.values()], list(ready)


def know(cache: KVCache, prompt: Prompt, keys: Sequence[bytes], pages: Sequence[int]) -> None:
    """Lets later prompts find `pages` by `keys`, if all in them is of the present weights."""
    if prompt.age == cache.pool.age:
        for key, page in zip(keys, pages, strict=False):
            cache.pool.know(key, page)


def _reuse(cache: KVCache, prompt: Prompt) -> None:
    """Gives a prompt the pages that it needs next, as far as others have computed them. None has a state."""
    if cache.config.delta:
        return
    if not prompt.pages:
        prompt.age = cache.pool.age
    if prompt.age != cache.pool.age:
        return
    for key in prompt.keys[len(prompt.pages) :]:
        page = cache.pool.find(key)
        if page is None:
            return
        prompt.pages.append(page)
        prompt.done += PAGE
