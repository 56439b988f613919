"""Hands versions to an engine's worker processes ahead of the swap, over a private ZeroMQ socket.

WeightStager (ROUTER) ◀─ hello ─ worker (DEALER)
                ─ manifest, payload ─▶
                ◀─ staged | refused, digest, why ─
"""

import asyncio
from pathlib import Path

import zmq
import zmq.asyncio

from areal_q import messages
from areal_q.errors import EngineDied
from areal_q.weights.version import WeightVersion

MAX_REPLY_BYTES = 4096


class WeightStager:
    """The sending end, whose socket lies in `directory`, which only this user can enter. Only one task at a
    time may use it."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = f"ipc://{directory / 'weights'}"
        self._context = zmq.asyncio.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.bind(self.endpoint)
        self._peers: list[bytes] = []

    async def wait_for_workers(self, workers: int, timeout_s: float) -> None:
        """Waits until `workers` workers have connected. Raises EngineDied if they have not in `timeout_s`."""
        self._peers = [(await self._answer(timeout_s, "hello"))[0] for _ in range(workers)]

    async def send(self, weights: WeightVersion, timeout_s: float) -> None:
        """Sends `weights` and returns when every worker has received and verified them. Raises EngineDied if a
        worker refuses them, is gone, or does not answer in `timeout_s`."""
        manifest = messages.encode(weights.manifest)
        payload = weights.payload.numpy().data
        for peer in self._peers:
            try:
                await self._router.send_multipart([peer, manifest, payload], copy=False)
            except zmq.ZMQError as error:
                raise EngineDied(f"a worker of the engine left: {error}") from error
        digest = weights.manifest.digest.encode()
        waiting = set(self._peers)
        while waiting:
            peer, verdict, *rest = await self._answer(timeout_s, "staged weights")
            if rest[:1] != [digest]:
                continue  # This answers an earlier version, whose sending was cancelled.
            if verdict != b"staged":
                raise EngineDied(f"version {weights.manifest.version} refused: {rest[1].decode()}")
            waiting.discard(peer)

    async def _answer(self, timeout_s: float, what: str) -> list[bytes]:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._router.recv_multipart()
        except TimeoutError as error:
            raise EngineDied(f"no {what} from the engine's worker in {timeout_s:.0f} s") from error

    def close(self) -> None:
        self._context.destroy(linger=0)
