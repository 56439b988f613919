"""Versions on their way out while the learner goes on: quantized, hashed and handed over on a thread.

    Learner ─begin(model)─▶ Publisher.make ─▶ announce: history, then broadcaster ─▶ finish() tells the learner
                                 │ reads the weights themselves: nothing is copied for it
    TorchPolicy ─release()── waits ──┘ before the optimizer writes to them

| wait    | for                                        | unblocked by |
|---------|--------------------------------------------|--------------|
| begin   | the version before                         | the thread   |
| release | the weights' last reading for this version | the thread   |
| finish  | the version begun last, handed over        | the thread   |

Forward and backward only read weights, and take many times as long as quantizing: so neither `release` nor
`finish`, called after the next step, finds anything to wait for. One version is on its way at a time, in the
order of their numbers, which bounds memory; what the broadcaster does with it overlaps further still.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from areal_q.models import Decoder
from areal_q.weights.version import WeightVersion
from learner.publishing.version_builder import Publisher

T = TypeVar("T")


class Outlet:
    """Makes each version from the weights as they are at `begin`, to the bit what `Publisher.make` gives
    there (test_a_version_in_the_making_is_of_the_weights_at_its_beginning)."""

    def __init__(self, publisher: Publisher, announce: Callable[[WeightVersion], None]) -> None:
        """`announce` is called on the outlet's thread."""
        self.publisher, self._announce = publisher, announce
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outlet")
        self._pending: Future[WeightVersion] | None = None
        self._read = threading.Event()
        self.waited_s = 0.0
        """Of the learner's time, since the start"""

    def begin(self, model: Decoder, version: int, beside: Mapping[str, Tensor]) -> None:
        """Version `version`, of the present weights and the tensors `beside` them. They may be read, but not
        be written to before `release` has returned. Call `finish` before."""
        assert self._pending is None, "one at a time"
        self._read.clear()
        self._pending = self._thread.submit(self._make, model, version, beside)

    def release(self) -> None:
        """Returns as soon as no weights are read here."""
        if self._pending is not None:
            self._waiting(self._read.wait)

    def finish(self) -> WeightVersion | None:
        """The version begun last, once it was announced; None if it was returned before. Raises what making
        it raised, such as QuantizationError."""
        pending, self._pending = self._pending, None
        return self._waiting(pending.result) if pending else None

    def close(self) -> None:
        """Waits for the thread."""
        self._thread.shutdown()

    def _make(self, model: Decoder, version: int, beside: Mapping[str, Tensor]) -> WeightVersion:
        try:
            made = self.publisher.make(model, version, beside)
        finally:
            self._read.set()
        self._announce(made)
        return made

    def _waiting(self, wait: Callable[[], T]) -> T:
        began = time.perf_counter()
        try:
            return wait()
        finally:
            self.waited_s += time.perf_counter() - began
