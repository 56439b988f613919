"""An SGLang server that a worker starts: it listens on loopback, requires a key, and ends with the worker."""

import asyncio
import contextlib
import os
import secrets
import signal
from pathlib import Path
from typing import Any

import msgspec

from areal_q.config import SglangEngine
from areal_q.errors import EngineDied
from areal_q.models import DecoderConfig
from areal_q.system.ports import free_ports
from areal_q.system.processes import module_command
from rollout.engines.process import checkpoint_backend
from rollout.engines.sglang_backend.http_client import SglangClient
from rollout.engines.sglang_backend.server_main import CPU_ATTENTION

SGLANG_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "SGLANG_TIMEOUT_KEEP_ALIVE": "86400",
    "TOKENIZERS_PARALLELISM": "false",
}
SGLANG_GPU_ENVIRONMENT = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
"""Environment variables for GPUs newer than Hopper, on which SGLang would otherwise round the scales of FP8
blocks to powers of two and requantize"""
SGLANG_CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TORCH_COMPILE_DISABLE": "1"}
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "incremental_streaming_output": True,
    "stream_interval": 1,
    "grammar_backend": "none",
    # A response ends only with a stop id that its request names.
    "json_model_override_args": '{"eos_token_id": null}',
    "log_level": "error",
}
"""The ServerArgs that are the same in every run"""
CPU_CACHE_BYTES = 256 << 20
RESERVED_POSITIONS = 16
"""Positions of context beyond those that the run needs, since SGLang admits only prompts that are some tokens
shorter than its context"""


class SglangProcess:
    """The processes of a server. They form one process group, which ends as a whole."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, key: str) -> None:
        self._process = process
        self.pid = process.pid
        self.url, self.key = url, key

    @classmethod
    async def start(cls, settings: dict[str, Any], directory: Path) -> "SglangProcess":
        """Starts a server on a free port with a new key. `settings` are the other fields of SGLang's
        ServerArgs. The server puts its sockets in `directory`, and this process or the server, whichever ends
        last, removes it."""
        port, key = free_ports(1)[0], secrets.token_hex(32)
        environment = dict(SGLANG_ENVIRONMENT)
        if settings.get("device") == "cpu":
            environment |= SGLANG_CPU_ENVIRONMENT
        elif not checkpoint_backend.is_hopper():
            environment |= SGLANG_GPU_ENVIRONMENT
        process = await asyncio.create_subprocess_exec(
            *module_command("rollout.engines.sglang_backend.server_main", str(directory)),
            env=environment | os.environ | {"TMPDIR": str(directory)},
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        address = {"host": "127.0.0.1", "port": port, "api_key": key}
        process.stdin.write(msgspec.json.encode(settings | address) + b"\n")
        return cls(process, f"http://127.0.0.1:{port}", key)

    async def up(self, client: SglangClient, timeout_s: float) -> dict[str, Any]:
        """Waits until the server answers, and returns its /server_info. Raises EngineDied if it ends before
        that or does not answer within `timeout_s`."""
        answer = asyncio.ensure_future(client.up(timeout_s))
        ended = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait([answer, ended], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise EngineDied(f"SGLang did not start: exit code {ended.result()}")
            return answer.result()
        finally:
            for task in (answer, ended):
                task.cancel()
            await asyncio.gather(answer, ended, return_exceptions=True)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def close(self) -> None:
        self.kill()
        await self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def server_settings(
    config: SglangEngine, path: str, model: DecoderConfig, stamp: str
) -> dict[str, Any]:
    """Returns the ServerArgs to serve the checkpoint in `path`, with `stamp` as the version of its tokens."""
    cpu = not checkpoint_backend.has_gpu()
    positions = (config.max_positions or model.max_positions) + RESERVED_POSITIONS
    float32 = config.dtype == "float32" or (config.dtype == "auto" and cpu)
    settings: dict[str, Any] = SETTINGS | {
        "model_path": path,
        "weight_version": stamp,
        "dtype": "float32" if float32 else "bfloat16",
        "max_running_requests": config.slots,
        "max_total_tokens": config.kv_cache_tokens or None,
        "context_length": positions,
        "tp_size": config.tensor_parallel,
        "disable_cuda_graph": not config.compiled,
        "disable_radix_cache": not config.prefix_cache,
        # With the overlap a step is under way while weights change in place, so that a token would be stamped
        # with the version after the one that drew it.
        "disable_overlap_schedule": cpu or config.kv_on_update == "keep",
        "enable_deterministic_inference": config.seeded,
        "sampling_mask_max_tokens": max(4096, model.vocab_size),
        "enable_return_routed_experts": bool(model.sparse_layers),
    }
    if float32 and not cpu:
        settings["attention_backend"] = "triton"  # FlashAttention takes no float32
    if cpu:
        token_bytes = 2 * model.layers * model.kv_heads * model.head_dim * (4 if float32 else 2)
        most = max(config.slots * positions, 4096)
        settings |= {
            "device": "cpu",
            "attention_backend": CPU_ATTENTION,
            "sampling_backend": "pytorch",
            "sleep_on_idle": True,  # it would keep a core busy while it has nothing to draw
            "mem_fraction_static": 0.1,
            "max_total_tokens": config.kv_cache_tokens or min(most, CPU_CACHE_BYTES // token_bytes),
        }
    return settings
