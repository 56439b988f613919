"""Publishes versions of the weights while the learner computes the next step.

    Learner ─begin(model)─▶ VersionBuilder.build ─▶ hand_over: history, then WeightServer ─▶ wait_until_out()
                                 │ reads the weights themselves: nothing is copied for it      tells the Learner
    TorchPolicy ─wait_until_read()┘ before the optimizer writes to them

| wait            | for                                        | unblocked by |
|-----------------|--------------------------------------------|--------------|
| wait_until_read | the weights' last reading for this version | the thread   |
| wait_until_out  | the version begun last, handed over        | the thread   |

Forward and backward passes only read weights, and take many times as long as quantizing. The waits are called
in and after the next step, when there is usually nothing left to wait for. Versions are built one at a time, in
the order of their numbers, which bounds memory; the weight server's work on them overlaps with further steps.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from areal_q.models import Decoder
from areal_q.weights.version import WeightVersion
from learner.publishing.version_builder import VersionBuilder

T = TypeVar("T")


class WeightPublisher:
    """Builds all versions on one thread of its own, each from the weights as they were at its `begin`.

    The version has the very bytes that `VersionBuilder.build` would give at that moment
    (test_a_version_is_of_the_weights_it_began_with).
    """

    def __init__(self, builder: VersionBuilder, hand_over: Callable[[WeightVersion], None]) -> None:
        """`hand_over` is called with each version that was built, on the publisher's thread."""
        self.builder, self._hand_over = builder, hand_over
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._pending: Future[WeightVersion] | None = None
        self._read = threading.Event()
        self.waited_s = 0.0
        """Seconds that the learner's thread has spent in both waits since the last `begin`"""
        self._nbytes = 0
        """Size in bytes of the version that `wait_until_out` returned last"""

    def begin(self, model: Decoder, version: int, beside: Mapping[str, Tensor]) -> None:
        """Begins to build version `version` of the present weights and the tensors `beside` them; returns at
        once.

        Until `wait_until_read` has returned, the weights may be read but not written to. Call `wait_until_out`
        for the version before first.
        """
        assert self._pending is None, "one at a time"
        self._read.clear()
        self.waited_s = 0.0
        # Taken here: a forward pass that begins meanwhile may put others in the place of its parameters.
        state = model.state_dict()
        self._pending = self._thread.submit(self._build, model, version, beside, state)

    def wait_until_read(self) -> None:
        """Waits until the present version no longer reads the weights, so that the optimizer may write to
        them."""
        if self._pending is not None:
            self._waiting(self._read.wait)

    def wait_until_out(self) -> WeightVersion | None:
        """Waits until the version begun last was handed over, and returns it; None if it was returned before.

        Raises the error with which building it failed, such as QuantizationError.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        made = self._waiting(pending.result)
        self._nbytes = made.manifest.nbytes
        return made

    def metrics(self) -> dict[str, float]:
        """Returns metrics about the version that is out, and how long the learner waited for it."""
        return {
            "weights/bytes": self._nbytes,
            "weights/publish_s": self.waited_s,
            "weights/make_s": self.builder.build_s,
            "weights/codes_moved": self.builder.codes_moved,
        }

    def close(self) -> None:
        """Waits for the thread and ends it."""
        self._thread.shutdown()

    def _build(
        self,
        model: Decoder,
        version: int,
        beside: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
    ) -> WeightVersion:
        try:
            built = self.builder.build(model, version, beside, state)
        finally:
            # This is set after a failure, too, or the learner would wait for ever; wait_until_out raises it.
            self._read.set()
        self._hand_over(built)
        return built

    def _waiting(self, wait: Callable[[], T]) -> T:
        began = time.perf_counter()
        try:
            return wait()
        finally:
            self.waited_s += time.perf_counter() - began
