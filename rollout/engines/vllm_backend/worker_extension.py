"""The part that runs inside vLLM's worker process: it receives weights over ZeroMQ, verifies and swaps them.

    adapter ─manifest, payload─▶ Stage (a thread; generation goes on) ─▶ staged ─▶ adapter
    adapter ─swap(digest)─▶ Worker: layerwise reload between two steps of the engine

vLLM imports this module by name in its worker (`worker_extension_cls`), which registers the transfer
backend. Method names must not be those of vLLM's own Worker.
"""

# pyright: reportMissingImports=false

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import vllm._custom_ops as custom_ops
import zmq
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from areal_q import messages
from areal_q.errors import RecordError, WeightVersionError
from areal_q.models.low_bit.lora import with_adapters_added
from areal_q.weights.version import PayloadPool, WeightVersion, check_version, unpack_version
from rollout.engines.vllm_backend.lora_requests import runs_apart
from rollout.engines.vllm_backend.worker_cpu import (
    draw_discarded_tokens_without_seed,
    keep_float32_off_sgl,
    keep_no_more_than_top_k,
)
from rollout.engines.vllm_backend.worker_lora import load_adapters, model_has_adapters

BACKEND = "areal_q"
STAGED, REFUSED = b"staged", b"refused"
PARENT_S = 1.0
_E4M3_MAX = 448.0


@dataclass
class StagerAddress(WeightTransferInitInfo):
    endpoint: str
    adapter: int
    """Process id of the rollout worker"""


@dataclass
class Staged(WeightTransferUpdateInfo):
    digest: str


def ancestors(pid: int) -> Iterator[int]:
    """Yields the process id of the parent of `pid`, of its parent and so on, without init. When a parent dies,
    its child gets another parent at once."""
    while True:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return
        pid = int(status.rpartition(")")[2].split()[1])
        if pid <= 1:
            return
        yield pid


class Stage(threading.Thread):
    """Receives versions one after the other, verifies them and keeps the newest."""

    def __init__(self, address: StagerAddress) -> None:
        super().__init__(name="areal-q-stage", daemon=True)
        self._adapter = address.adapter
        self._between = list(takewhile(lambda pid: pid != self._adapter, ancestors(os.getpid())))
        """Ids of vLLM's own processes between this one and the rollout worker"""
        self._pool = PayloadPool()
        self._lock = threading.Lock()
        self._version: WeightVersion | None = None
        self._closing = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address.endpoint)
        self._socket.send(b"hello")
        self.start()

    def take(self, digest: str) -> WeightVersion:
        with self._lock:
            version, self._version = self._version, None
        if version is None or version.manifest.digest != digest:
            raise WeightVersionError(f"version {digest} is not staged")
        return version

    def close(self) -> None:
        self._closing = True
        if self.is_alive():
            self.join()

    def run(self) -> None:
        try:
            while not self._closing:
                if self._socket.poll(int(PARENT_S * 1000)):
                    self._receive()
                elif self._adapter not in ancestors(os.getpid()):
                    self._end()
        finally:
            self._context.destroy(linger=0)

    def _end(self) -> None:
        """Ends vLLM's processes, since the rollout worker was killed and nobody else would."""
        for pid in self._between:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(1)

    def _receive(self) -> None:
        digest = b""
        try:
            manifest = messages.decode_manifest(self._socket.recv())
            digest = manifest.digest.encode()
            check_version(manifest)
            payload = self._pool.lend(manifest.nbytes)
            if manifest.nbytes:
                self._socket.recv_into(payload.numpy().data)
            version = unpack_version(manifest, payload)
            if not runs_apart(manifest):
                tensors = dict(with_adapters_added(version.tensors, manifest.extra))
                version = replace(version, tensors=tensors)
        except (RecordError, WeightVersionError) as error:
            while self._socket.getsockopt(zmq.RCVMORE):
                self._socket.recv()
            self._socket.send_multipart([REFUSED, digest, str(error).encode()])
            return
        with self._lock:
            self._version = version
        self._socket.send_multipart([STAGED, digest])


class ZmqTransfer(WeightTransferEngine[StagerAddress, Staged]):
    """vLLM's side of a weight update; the base class is vLLM's own interface for it."""

    init_info_cls, update_info_cls = StagerAddress, Staged
    _stage: Stage | None = None

    def init_transfer_engine(self, init_info: StagerAddress) -> None:
        self.shutdown()
        self._stage = Stage(init_info)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Staged) -> None:
        self.model.load_weights(iter(self.take(update_info.digest).tensors.items()))

    def take(self, digest: str) -> WeightVersion:
        assert self._stage is not None
        return self._stage.take(digest)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        if self._stage is not None:
            self._stage.close()
            self._stage = None


WeightTransferEngineFactory.register_engine(BACKEND, ZmqTransfer)
if not torch.cuda.is_available():
    keep_float32_off_sgl()
    draw_discarded_tokens_without_seed()
    keep_no_more_than_top_k()


class WorkerExtension:
    """Methods that are mixed into vLLM's Worker, and that the rollout worker calls by `collective_rpc`."""

    model_runner: Any
    model_config: Any
    weight_transfer_engine: ZmqTransfer
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any

    def areal_pid(self) -> int:
        return os.getpid()

    def areal_swap(self, digest: str) -> None:
        """Loads the staged version, in one call so that no step of the engine can run in the middle of it."""
        if model_has_adapters(self.model_runner.model):
            # vLLM's own update would remove the adapter.
            load_adapters(self.model_runner.model, self.weight_transfer_engine.take(digest))
            return
        with _scales_kept_alive(), _default_dtype(self.model_config.dtype):
            self.start_weight_update()
            self.update_weights({"digest": digest})
            self.finish_weight_update()
            for module in self.model_runner.model.modules():
                # A head tied to the embedding has no weights to load. On a CPU it has a packed copy of the
                # embedding's, which the reload does not renew.
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
                # A reload leaves a mixture's experts as they were loaded, which CPU kernels do not read.
                if isinstance(module, RoutedExperts) and not torch.cuda.is_available():
                    experts = module.quant_method.moe_kernel.fused_experts
                    experts.process_weights_after_loading(module)

    def areal_linears(self) -> dict[str, str]:
        """Returns, by the name of each linear layer in the decoder, the class that really computes it."""
        return {
            name: type(getattr(module, "scheme", None) or module.quant_method).__name__
            for name, module in self.model_runner.model.named_modules()
            if isinstance(module, LinearBase) and ".layers." in name
        }

    def areal_observe(self) -> None:
        """Records from now on the largest key and value of each attention layer."""
        for _, layer in self._attention():
            layer.areal_largest = torch.zeros(2, device=layer._k_scale.device)
            layer.register_forward_pre_hook(_observe)

    def areal_rescale(self) -> None:
        """Sets the scales of the FP8 KV cache so that all keys and values since the last call fit into E4M3.

        The cache must be empty, since anything in it was written with the old scales.
        """
        for _, layer in self._attention():
            for kind, largest in zip("kv", layer.areal_largest.tolist(), strict=True):
                if largest > 0:
                    # vLLM keeps it in two places: a tensor for GPU kernels, and a number for others.
                    getattr(layer, f"_{kind}_scale").fill_(largest / _E4M3_MAX)
                    setattr(layer, f"_{kind}_scale_float", largest / _E4M3_MAX)
            layer.areal_largest.zero_()

    def areal_scales(self) -> dict[str, tuple[float, float]]:
        """Returns the scales of keys and values in each layer's cache."""
        return {n: (layer._k_scale_float, layer._v_scale_float) for n, layer in self._attention()}

    def _attention(self) -> Iterator[tuple[str, Any]]:
        for name, module in self.model_runner.model.named_modules():
            if isinstance(module, Attention):
                yield name, module


def _observe(layer: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    _, key, value = inputs[:3]
    for largest, tensor in zip(layer.areal_largest, (key, value), strict=True):
        if tensor.numel():  # nothing here makes the host wait for a GPU
            torch.maximum(largest, tensor.abs().amax().float(), out=largest)


@contextlib.contextmanager
def _scales_kept_alive() -> Iterator[None]:
    """Gives each INT8 product of oneDNN that is made within this context a copy of its scales that lives as
    long as the product. It keeps a bare pointer to them, and after a reload had freed them its results would be
    NaN."""
    create = custom_ops.create_onednn_scaled_mm

    def create_with_copy(weight: torch.Tensor, scales: torch.Tensor, *more: Any) -> Any:
        copy = scales.clone()
        handler = create(weight, copy, *more)
        handler.areal_scales = copy
        return handler

    custom_ops.create_onednn_scaled_mm = create_with_copy
    try:
        yield
    finally:
        custom_ops.create_onednn_scaled_mm = create


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets torch's default dtype within this context. vLLM makes its kernels for that dtype, but sets it only
    while it loads from disk."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
