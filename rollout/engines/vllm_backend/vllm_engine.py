"""vLLM as a GenerationBackend: AsyncLLM, whose core and workers are processes of their own.

It starts from a checkpoint of the first published version, so that its layers are built for the format. Later
versions go to the workers ahead of the swap (rollout/engines/vllm_backend/worker_extension.py). Log-probs are
vLLM's `processed_logprobs`, of the distribution that drew, after temperature, top-k and top-p. The core itself
stamps every token with its version. Written against vLLM 0.32 and 0.33.
"""

# pyright: reportMissingImports=false

import asyncio
import contextlib
import gc
import os
import signal
import tempfile
from collections.abc import AsyncGenerator, Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from areal_q.checks.packages import check_engine_packages
from areal_q.config import VllmEngine
from areal_q.config.engines import vllm_draws
from areal_q.config.run import LARGEST_MASK
from areal_q.errors import ConfigError, EngineDied, RecordError
from areal_q.messages import Manifest
from areal_q.models import DecoderConfig
from areal_q.models.hf.vllm_shapes import vllm_refuses
from areal_q.weights.version import WeightVersion
from rollout.engines.base import Capabilities, Request, check_fits
from rollout.engines.process import checkpoint_backend
from rollout.engines.process.generation_backend import CompletionDelta
from rollout.engines.process.own_directory import OwnDirectory
from rollout.engines.process.process_end import first_end
from rollout.engines.process.streaming_engine import StreamingEngine
from rollout.engines.vllm_backend import cpu_kernels, lora_requests, sampling_params
from rollout.engines.vllm_backend.cache_size import cache_for
from rollout.engines.vllm_backend.start_error import SharedOutput
from rollout.engines.vllm_backend.weight_stager import WeightStager

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_T = TypeVar("_T")

SHUTDOWN_S = 5.0
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
VLLM_GPU_ENVIRONMENT = {
    "VLLM_USE_DEEP_GEMM_E8M0": "0",
    "VLLM_DISABLED_KERNELS": "FlashInferMxFp4LinearKernel",
}
"""Environment variables that make vLLM run what was published. Without them it rounds the scales of FP8 blocks
to powers of two and requantizes, and rounds the activations of MXFP4 to four bits if the GPU can."""
VLLM_GPU_FORMATS = frozenset(f for f, _ in cpu_kernels.KERNELS) | {
    "int8-weight", "int4-g32", "fp8-weight", "fp8", "nvfp4", "mxfp4"
}  # fmt: skip
VLLM_HOPPER_FORMATS = VLLM_GPU_FORMATS | {"int4-fp8"}
EXTENSION = "rollout.engines.vllm_backend.worker_extension"


def vllm_engine(config: VllmEngine) -> StreamingEngine:
    """Returns the vLLM engine. Raises ConfigError if vLLM is not installed, and for settings that it would
    ignore."""
    check_engine_packages(config)
    if config.compiled and config.kv_cache == "fp8":
        raise ConfigError(
            "rollout.engine.compiled with kv_cache = 'fp8': compiled code does not measure keys and values"
        )
    return StreamingEngine(VllmBackend(config))


class VllmBackend:
    name = "vllm"

    def __init__(self, config: VllmEngine) -> None:
        self.config = config
        self.capabilities = Capabilities(
            formats=_formats(),
            kv_on_update=frozenset({"keep", "recompute"}),
            kv_cache=frozenset({"auto", "fp8"}),
            sampling_mask=True,
            of_experts=None if checkpoint_backend.has_gpu() else cpu_kernels.OF_EXPERTS,
        )
        self.slots, self.timeout_s = config.slots, config.timeout_s
        self.restarts, self.keeps_cache = config.restarts, config.kv_on_update == "keep"
        self.pids: list[int] = []
        """Ids of the processes that hold the model"""
        self._llm: AsyncLLM | None = None
        self._stager: WeightStager | None = None
        self._directory: OwnDirectory | None = None
        self._first: Manifest | None = None
        self._model: DecoderConfig | None = None
        self.max_positions = 0
        self._salt = ""
        self._adapter: Any = None
        self._requests = 0

    async def prepare(self) -> None:
        for name, value in VLLM_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(int(self.config.start_timeout_s)))
        await asyncio.to_thread(_import_vllm)

    def check_weights(self, weights: WeightVersion) -> None:
        checkpoint_backend.check_weights(weights, self._first)
        lora_requests.check_adapters(weights, self._first)

    def check_request(self, request: Request) -> None:
        assert self._model is not None
        check_fits(request, self.max_positions, self._model.vocab_size)
        temperature = request.sampling.temperature
        if not vllm_draws(temperature):
            raise RecordError(f"temperature = {temperature}: vLLM takes 0, or 0.01 to 2")

    async def launch(self, weights: WeightVersion) -> None:
        await self.close()
        manifest = weights.manifest
        settings = _settings(self.config, manifest)
        self._directory = own = OwnDirectory("areal-q-vllm-", tempfile.gettempdir())
        directory = own.path
        try:
            await asyncio.to_thread(
                checkpoint_backend.write_version, lora_requests.without_adapters(weights), directory
            )
            self._llm = await self._construct(str(directory), settings)
            self._stager = WeightStager(directory)
            await self._connect(self._llm, self._stager, manifest.format)
            own.note_segments(self.pids)
            self._adapter = lora_requests.lora_request(manifest)
            if lora_requests.has_adapters(manifest):  # the checkpoint is of the base alone
                await self.stage(weights)
                await self._swap(manifest)
            await self._stamp(manifest)
        except BaseException:
            await self.close()
            raise
        finally:
            for path in directory.glob("*.*"):
                path.unlink()
        self._first, self._model = manifest, DecoderConfig.from_hf(manifest.model)
        self.max_positions = settings["max_model_len"] or self._model.max_positions

    async def stage(self, weights: WeightVersion) -> None:
        if self._stager is None:  # a launch was cancelled, or failed
            raise EngineDied("vLLM is not running")
        await self._stager.send(weights, self.timeout_s)

    async def pause(self) -> None:
        stop = self._running().pause_generation(mode="keep", clear_cache=not self.keeps_cache)
        await self._answer(stop, "pause")

    async def push(self, weights: WeightVersion) -> None:
        await self._swap(weights.manifest)
        if self.config.kv_cache == "fp8":
            rescaled = self._running().collective_rpc("areal_rescale")
            await self._answer(rescaled, "rescale")
        await self._stamp(weights.manifest)

    async def resume(self) -> None:
        await self._answer(self._running().resume_generation(), "resume")

    async def stream(self, request: Request, seed: int) -> AsyncGenerator[CompletionDelta, None]:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        assert self._model is not None
        llm = self._running()
        self._requests += 1
        prompt: Any = {
            "prompt_token_ids": np.asarray(request.prompt_ids).tolist(),
            # Requests share cached keys and values only within one loading of weights.
            "cache_salt": self._salt,
        }
        outputs = llm.generate(
            prompt,
            sampling_params.vllm_sampling_params(request, seed, self._model.vocab_size),
            str(self._requests),
            lora_request=self._adapter,
        )
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield sampling_params.vllm_delta(output.outputs[0], request.masked)
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineDied(f"vLLM: {error}") from error

    @property
    def pid(self) -> int:
        """Id of the first process that holds the model; 0 if there is none."""
        return self.pids[0] if self.pids else 0

    async def ended(self) -> None:
        await first_end(self.pids)

    async def kill(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def close(self) -> None:
        """Ends the processes, whatever state they are in, and removes their directory."""
        llm, self._llm = self._llm, None
        if llm is not None:
            shutdown = asyncio.to_thread(llm.shutdown, timeout=SHUTDOWN_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * SHUTDOWN_S):
                    await shutdown
            await self.kill()
            # It is part of a cycle; freed at the interpreter's end, without modules, its __del__ would fail.
            del llm, shutdown
            gc.collect()
        self.pids = []
        if self._stager is not None:
            self._stager.close()
            self._stager = None
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    async def _construct(self, path: str, settings: dict[str, Any]) -> "AsyncLLM":
        """Constructs vLLM in a thread, since it takes seconds. When cancelled it waits for the thread, so
        that nothing stays behind."""
        output = SharedOutput()
        starting = asyncio.ensure_future(asyncio.to_thread(_start_vllm, path, settings))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])
            if starting.exception() is None:
                starting.result().shutdown(timeout=SHUTDOWN_S)
            raise
        except (ValueError, RuntimeError) as error:
            reason, again = output.newest_error() or (str(error), isinstance(error, ValueError))
            reason = " ".join(reason.split())
            if again:
                raise ConfigError(f"vLLM refuses the settings or the model: {reason}") from error
            raise EngineDied(f"vLLM did not start: {reason}") from error

    async def _connect(self, llm: "AsyncLLM", stager: WeightStager, format: str) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self.pids = await self._answer(llm.collective_rpc("areal_pid"), "process id")
        address = WeightTransferInitRequest({"endpoint": stager.endpoint, "adapter": os.getpid()})
        await self._answer(llm.init_weight_transfer_engine(address), "connection")
        await stager.wait_for_workers(self.config.tensor_parallel, self.timeout_s)
        linears = (await self._answer(llm.collective_rpc("areal_linears"), "linears"))[0]
        checkpoint_backend.check_quantized("vLLM", linears, format)
        if self.config.kv_cache == "fp8":
            await self._answer(llm.collective_rpc("areal_observe"), "observers")

    async def _swap(self, manifest: Manifest) -> None:
        """Replaces the weights by the staged version `manifest`."""
        swapped = self._running().collective_rpc("areal_swap", args=(manifest.digest,))
        await self._answer(swapped, "swap")

    async def _stamp(self, manifest: Manifest) -> None:
        """Makes vLLM stamp the tokens drawn from now on with version `manifest`."""
        self._salt = checkpoint_backend.fresh_salt()
        stamp = checkpoint_backend.version_stamp(manifest)
        await self._answer(self._running().update_weight_version(stamp), "version")

    def _running(self) -> "AsyncLLM":
        if self._llm is None:
            raise EngineDied("vLLM is not running")
        return self._llm

    async def _answer(self, call: Awaitable[_T], what: str) -> _T:
        """Returns the result of `call`. Raises EngineDied if vLLM fails or does not answer in time; `what`
        names the call in the message."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            async with asyncio.timeout(self.timeout_s):
                return await call
        except TimeoutError as error:
            raise EngineDied(f"vLLM did not answer ({what}) in {self.timeout_s:.0f} s") from error
        except EngineDeadError as error:
            raise EngineDied(f"vLLM died ({what})") from error
        except Exception as error:  # vLLM passes on every error of its worker as a bare Exception
            raise EngineDied(f"vLLM failed ({what}): {error}") from error


def _formats() -> frozenset[str]:
    if not checkpoint_backend.has_gpu():
        return cpu_kernels.FORMATS
    return VLLM_HOPPER_FORMATS if checkpoint_backend.is_hopper() else VLLM_GPU_FORMATS


def _settings(config: VllmEngine, manifest: Manifest) -> dict[str, Any]:
    """Returns the fields of vLLM's AsyncEngineArgs that follow from the settings and the first version. Raises
    ConfigError for settings that do not fit the version."""
    model = DecoderConfig.from_hf(manifest.model)
    if problem := vllm_refuses(model, manifest.format, config.tensor_parallel):
        raise ConfigError(f"rollout.format = {manifest.format!r}: {problem}")
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    positions, cache_bytes = config.max_positions or None, config.kv_cache_bytes or None
    if not checkpoint_backend.has_gpu():
        cpu_kernels.check_heads(model.head_dim)
        dtype = cpu_kernels.dtype_for(manifest.format, config.dtype)
        cache_bytes, positions = cache_for(config, model, dtype)
    return {
        "dtype": dtype,
        "enforce_eager": not config.compiled,
        "max_num_seqs": config.slots,
        "max_model_len": positions,
        "kv_cache_memory_bytes": cache_bytes,
        "kv_cache_dtype": config.kv_cache,
        "enable_prefix_caching": config.prefix_cache,
        "tensor_parallel_size": config.tensor_parallel,
        **lora_requests.engine_arguments(manifest),
    }


def _import_vllm() -> None:
    environment = (
        VLLM_GPU_ENVIRONMENT if checkpoint_backend.has_gpu() else cpu_kernels.VLLM_CPU_ENVIRONMENT
    )
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    # vLLM keeps the frames of these imports: were they `_start_vllm`'s, it would be kept with its result.
    import vllm.v1.engine.async_llm  # noqa: F401
    from vllm import AsyncEngineArgs  # noqa: F401


def _start_vllm(path: str, settings: dict[str, Any]) -> "AsyncLLM":
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            path,
            logprobs_mode="processed_logprobs",
            max_logprobs=LARGEST_MASK,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            worker_extension_cls=f"{EXTENSION}.WorkerExtension",
            weight_transfer_config=WeightTransferConfig(backend="areal_q"),
            **settings,
        )
    )
