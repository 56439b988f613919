"""The pages of the KV cache that are in use, and those that hold what a later prompt begins with.

A page holds the keys and values of PAGE tokens that follow one another. It has as many owners as rows and
prompts read it: the responses to a prompt own its whole pages together, and so do prompts that begin alike. A
whole page is known by a digest of all tokens up to its end, so that a page found by its key needs no
comparison. Pages that nobody owns stay known until there is need of them, the longest unused first.

Nothing here knows of tensors; rollout/engines/reference/kv_cache.py holds the numbers.
"""

import sys
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from areal_q.config.engines import PAGE

NOTHING = 0
"""A page that is never given out and holds zeros, for places of a table that are not read"""
_FEWEST = 16
"""Fewest pages by which the pool grows"""


def page_keys(ids: np.ndarray, known: Sequence[bytes] = ()) -> list[bytes]:
    """Returns the keys of the whole pages of `ids` [T], of which the first ones are `known`."""
    keys, ids = list(known), np.ascontiguousarray(ids, np.int64)
    for end in range((len(keys) + 1) * PAGE, len(ids) + 1, PAGE):
        before = keys[-1] if keys else b""
        keys.append(blake2b(before + ids[end - PAGE : end].tobytes(), digest_size=16).digest())
    return keys


class PagePool:
    """Pages 1 … size - 1, of which at most `most` may exist; 0 means as many as are asked for."""

    def __init__(self, most: int = 0) -> None:
        self.most = most or sys.maxsize
        self.size = 1
        """Number of pages that exist, with NOTHING"""
        self.age = 0
        """How often it has forgotten"""
        self._free: list[int] = []
        self._owners: dict[int, int] = {}
        self._by_key: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}
        """Known pages that nobody owns, the longest unused first"""
        self._peak = 0
        """The most pages that had owners at once; as many are kept for later prompts."""

    @property
    def owned(self) -> int:
        """Number of pages that have owners."""
        return len(self._owners)

    def take(self, count: int) -> list[int]:
        """Returns `count` pages with one owner each. Raises MemoryError if they do not exist."""
        pages = []
        for _ in range(count):
            page = self._unused()
            self._owners[page] = 1
            pages.append(page)
        self._peak = max(self._peak, self.owned)
        return pages

    def _unused(self) -> int:
        if self._free:
            return self._free.pop()
        room = self.most + 1 - self.size
        if self._idle and (not room or len(self._idle) >= self._peak):
            page = next(iter(self._idle))
            del self._idle[page], self._by_key[self._keys.pop(page)]
            return page
        if not room:
            raise MemoryError(f"all {self.most} pages of the KV cache are in use")
        more = min(room, max(_FEWEST, self.size // 4))
        self._free.extend(range(self.size + more - 1, self.size - 1, -1))
        self.size += more
        return self._free.pop()

    def share(self, pages: Sequence[int]) -> list[int]:
        """Gives each of `pages`, which have owners, another one. Returns them."""
        for page in pages:
            self._owners[page] += 1
        return list(pages)

    def release(self, pages: Sequence[int]) -> None:
        """Takes an owner from each of `pages`. Of those that are left, the last ones go first."""
        for page in reversed(pages):
            self._owners[page] -= 1
            if self._owners[page]:
                continue
            del self._owners[page]
            if page in self._keys:
                self._idle[page] = None
            else:
                self._free.append(page)

    def know(self, key: bytes, page: int) -> None:
        """Lets `page` be found by `key`, unless another one is or it has a key."""
        if key not in self._by_key and page not in self._keys:
            self._by_key[key], self._keys[page] = page, key

    def find(self, key: bytes) -> int | None:
        """Returns the page of this key with one owner more, or None."""
        page = self._by_key.get(key)
        if page is not None:
            self._idle.pop(page, None)
            self._owners[page] = self._owners.get(page, 0) + 1
            self._peak = max(self._peak, self.owned)
        return page

    def forget(self) -> None:
        """Lets no page be found any more."""
        self.age += 1
        self._free.extend(self._idle)
        for known in (self._idle, self._by_key, self._keys):
            known.clear()
