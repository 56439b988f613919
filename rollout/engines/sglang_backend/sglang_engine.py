"""SGLang as a GenerationBackend, over HTTP: a server that the worker starts, or one that runs already.

    stage ─▶ a checkpoint of the version is written into memory (/dev/shm) while generation goes on
    pause ─▶ the KV cache of unfinished responses is kept in place, or dropped and computed again
    push  ─▶ SGLang reads the checkpoint and stamps tokens with the version from then on

Log-probs are those of the distribution that drew the token. SGLang reports them after the temperature; with
top-k or top-p they are those of its sampling mask, since the others are of the whole distribution. Written
against SGLang 0.5.23.
"""

import asyncio
import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from areal_q.checks.packages import check_engine_packages
from areal_q.config import SglangEngine
from areal_q.errors import ConfigError, EngineDied, RecordError
from areal_q.messages import Manifest
from areal_q.models import DecoderConfig
from areal_q.models.low_bit.lora import with_adapters_added
from areal_q.system.credentials import secret
from areal_q.weights.version import WeightVersion
from rollout.engines.base import Capabilities, Request, check_fits
from rollout.engines.process import checkpoint_backend
from rollout.engines.process.generation_backend import CompletionDelta
from rollout.engines.process.process_end import first_end
from rollout.engines.process.streaming_engine import StreamingEngine
from rollout.engines.sglang_backend import generate_requests, server_checks
from rollout.engines.sglang_backend.http_client import SglangClient
from rollout.engines.sglang_backend.server_process import SglangProcess, server_settings

SGLANG_CPU_FORMATS = frozenset({"bf16"})
"""Formats that SGLang computes on any CPU; its quantized products need AMX or a GPU."""
SGLANG_GPU_FORMATS = SGLANG_CPU_FORMATS | {
    "fp8", "fp8-channel", "fp8-weight", "int8", "int8-weight"
}  # fmt: skip
MEMORY = Path("/dev/shm")
ABORTS_S = 1.0
"""Seconds that `close` waits at most for the server to receive the cancellations of requests"""
PAUSES = {"keep": "in_place", "recompute": "retract"}


def sglang_engine(config: SglangEngine) -> StreamingEngine:
    """Returns the SGLang engine. Raises ConfigError if SGLang is not installed (for a server at a URL, if the
    HTTP client is not), or if the configured directory does not exist."""
    check_engine_packages(config)
    if config.directory and not Path(config.directory).is_dir():
        raise ConfigError(f"rollout.engine.directory: no directory {config.directory}")
    return StreamingEngine(SglangBackend(config))


def handover_directory(config: SglangEngine) -> str:
    """Returns the directory in which versions are handed over: the configured one, else one in memory if the
    system has such a place."""
    if config.directory:
        return config.directory
    return str(MEMORY) if os.access(MEMORY, os.W_OK) else tempfile.gettempdir()


def _write_served(weights: WeightVersion, directory: Path) -> None:
    """Writes `weights` with adapters added to what they adapt, since SGLang's LoRA replaces none of requests
    in flight, and with an output head: its mixtures know none that is tied to the embedding."""
    tensors = dict(with_adapters_added(weights.tensors, weights.manifest.extra))
    model = DecoderConfig.from_hf(weights.manifest.model)
    if model.sparse_layers and model.tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    checkpoint_backend.write_version(replace(weights, tensors=tensors), directory)


class SglangBackend:
    name = "sglang"

    def __init__(self, config: SglangEngine) -> None:
        self.config = config
        here = (
            SGLANG_GPU_FORMATS if config.url or checkpoint_backend.has_gpu() else SGLANG_CPU_FORMATS
        )
        self.capabilities = Capabilities(
            formats=here,
            kv_on_update=frozenset(PAUSES),
            sampling_mask=True,
            # A server at a URL would have to be started for it.
            routes=not config.url,
        )
        self.slots, self.timeout_s = config.slots, config.timeout_s
        self.restarts, self.keeps_cache = config.restarts, config.kv_on_update == "keep"
        self._server: SglangProcess | None = None
        self._client: SglangClient | None = None
        self._directory: Path | None = None
        self._staged: Path | None = None
        self._first: Manifest | None = None
        self._model: DecoderConfig | None = None
        self.max_positions = 0
        self._seeded = True
        """True if the server draws in its deterministic mode, whether or not the settings ask for it"""
        self._most_masked = 0
        """Size of the largest truncated distribution for which the server reports log-probs, in tokens"""
        self._salt = ""
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int:
        """Process id of the server that this worker started; 0 if there is none."""
        return self._server.pid if self._server else 0

    async def prepare(self) -> None:
        """Does nothing, since SGLang is imported only in the server's processes."""

    def check_weights(self, weights: WeightVersion) -> None:
        checkpoint_backend.check_weights(weights, self._first)

    def check_request(self, request: Request) -> None:
        assert self._model is not None
        check_fits(request, self.max_positions, self._model.vocab_size)
        if request.sampling.min_p and self._seeded:
            raise RecordError(
                "min_p: SGLang draws it without seeds only, and dies otherwise: "
                "rollout.engine.seeded = false"
            )
        kept = generate_requests.kept_tokens(request.sampling, self._model.vocab_size)
        if kept > self._most_masked:
            raise RecordError(
                f"top_p, top_k and min_p keep up to {kept} tokens; the server reports log-probs of a "
                f"truncated distribution for {self._most_masked}: --sampling-mask-max-tokens"
            )

    async def launch(self, weights: WeightVersion) -> None:
        await self.close()
        manifest = weights.manifest
        model = DecoderConfig.from_hf(manifest.model)
        self._directory = Path(
            tempfile.mkdtemp(prefix="areal-q-sglang-", dir=handover_directory(self.config))
        )
        if self.config.url:
            # The server may run as another user, and must be able to read the directory.
            self._directory.chmod(0o755)
        try:
            if self.config.url:
                info = await self._join(self.config.url, weights)
            else:
                info = await self._start(weights, model)
            linears = await server_checks.linears(self._running(), info, manifest.format)
            checkpoint_backend.check_quantized("SGLang", linears, manifest.format)
        except BaseException:
            await self.close()
            raise
        own = self.config.max_positions or model.max_positions
        self.max_positions = min(own, info["max_req_input_len"])
        self._most_masked = info["sampling_mask_max_tokens"]
        self._seeded = info["enable_deterministic_inference"]
        self._salt = checkpoint_backend.fresh_salt()
        self._first, self._model = manifest, model

    async def stage(self, weights: WeightVersion) -> None:
        if self._directory is None:  # a launch was cancelled, or failed
            raise EngineDied("SGLang is not running")
        self._unstage()
        self._staged = self._directory / weights.manifest.digest
        self._staged.mkdir()
        await asyncio.to_thread(_write_served, weights, self._staged)

    async def pause(self) -> None:
        client = self._running()
        await client.post("/pause_generation", {"mode": PAUSES[self.config.kv_on_update]})
        # SGLang answers the pause before it is complete. It answers later queries in order, after all tokens
        # that were drawn before, so that those have been read here by the second answer.
        for _ in range(2):
            await client.get("/server_info")

    async def push(self, weights: WeightVersion) -> None:
        update = {
            "model_path": str(self._staged),
            "load_format": "safetensors",
            "weight_version": checkpoint_backend.version_stamp(weights.manifest),
            "flush_cache": not self.keeps_cache,
        }
        await self._running().post("/update_weights_from_disk", update)
        self._salt = checkpoint_backend.fresh_salt()
        self._unstage()

    async def resume(self) -> None:
        await self._running().post("/continue_generation", {"torch_empty_cache": False})

    async def stream(self, request: Request, seed: int) -> AsyncGenerator[CompletionDelta, None]:
        assert self._model is not None
        client, rid, heard, done = self._running(), uuid.uuid4().hex, 0, False
        kept = generate_requests.kept_tokens(request.sampling, self._model.vocab_size)
        body = {
            "rid": rid,
            "input_ids": np.asarray(request.prompt_ids).tolist(),
            "sampling_params": generate_requests.sglang_sampling_params(request, seed, kept),
            "return_logprob": True,
            "return_sampling_mask": kept > 0,
            "return_routed_experts": bool(self._model.sparse_layers) and self.capabilities.routes,
            # Requests share cached keys and values only within one loading of weights.
            "extra_key": self._salt,
        }
        try:
            async with contextlib.aclosing(client.generate(body)) as chunks:
                async for chunk in chunks:
                    meta = chunk.meta_info
                    if meta is None:
                        raise EngineDied("SGLang: a chunk says nothing of its tokens")
                    done = meta.finish_reason is not None
                    generate_requests.check_end(chunk, meta, request)
                    yield generate_requests.sglang_delta(
                        chunk, meta, meta.completion_tokens - heard, request, self._model
                    )
                    heard = meta.completion_tokens
        finally:
            if not done:
                self._abort(client, rid)

    async def ended(self) -> None:
        await first_end([self.pid] if self.pid else [])

    async def kill(self) -> None:
        if self._server is not None:
            self._server.kill()
        elif self._client is not None:
            await self._client.close()

    async def close(self) -> None:
        """Ends the server if this worker started it, and otherwise the requests made of it."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=ABORTS_S)
        client, self._client = self._client, None
        server, self._server = self._server, None
        if client is not None:
            await client.close()
        if server is not None:
            await server.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = self._staged = None

    async def _start(self, weights: WeightVersion, model: DecoderConfig) -> dict[str, Any]:
        """Starts a server with `weights`. Returns its /server_info."""
        await self.stage(weights)
        assert self._directory is not None
        stamp = checkpoint_backend.version_stamp(weights.manifest)
        settings = server_settings(self.config, str(self._staged), model, stamp)
        self._server = server = await SglangProcess.start(settings, self._directory)
        self._client = SglangClient(server.url, server.key, self.timeout_s, reuse=True)
        info = await server.up(self._client, self.config.start_timeout_s)
        self._unstage()
        return info

    async def _join(self, url: str, weights: WeightVersion) -> dict[str, Any]:
        """Waits for the server at `url`, checks its settings and loads `weights` into it. Returns its
        /server_info. Raises ConfigError for settings that the adapter cannot work with."""
        self._client = SglangClient(url, secret("SGLANG_KEY_FILE"), self.timeout_s)
        info = await self._client.up(self.config.start_timeout_s)
        server_checks.check_settings(info, self.config)
        await self.stage(weights)
        await self._client.post("/pause_generation", {"mode": "retract"})
        await self._client.post("/abort_request", {"abort_all": True})
        await self.push(weights)
        await self._client.post("/flush_cache")
        await self.resume()
        await server_checks.check_logprobs(self._client, info["sampling_mask_max_tokens"])
        return info

    def _running(self) -> SglangClient:
        if self._client is None:
            raise EngineDied("SGLang is not running")
        return self._client

    def _unstage(self) -> None:
        if self._staged is not None:
            shutil.rmtree(self._staged, ignore_errors=True)
            self._staged = None

    def _abort(self, client: SglangClient, rid: str) -> None:
        """Asks SGLang to cancel request `rid`, without waiting. It would also notice the closed connection, but
        only seconds later."""

        async def ask() -> None:
            with contextlib.suppress(EngineDied):
                await client.post("/abort_request", {"rid": rid})

        task = asyncio.create_task(ask())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
