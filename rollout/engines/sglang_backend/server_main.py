"""`python -m rollout.engines.sglang_backend.server_main DIRECTORY`: an SGLang server that ends with the worker
that started it, and then removes DIRECTORY.

It reads the ServerArgs as one line of JSON from its standard input, so that the key is in no command line, and
ends when that input is closed. SGLang's output goes to standard error.
"""

# pyright: reportMissingImports=false

import os
import shutil
import signal
import sys
import threading
from typing import Any

import msgspec

CPU_ATTENTION = "torch_native"
LINEARS = "areal_q_linears"
"""Key in the server's /server_info for the class that computes each linear layer of the decoder"""


def main() -> None:
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=dict[str, Any])
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    os.dup2(2, 1)
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    if settings.get("device") == "cpu":
        allow_seeds_on_a_cpu()
    launch_server(ServerArgs(**settings), run_scheduler_process_func=run_scheduler)


def run_scheduler(*args: Any, **more: Any) -> None:
    """Runs SGLang's process that holds the model. It also reports the classes of the linear layers, and takes
    seeds on a CPU too."""
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process

    tell = Scheduler.get_init_info

    def tell_more(scheduler: Any) -> dict[str, Any]:
        model = scheduler.tp_worker.model_runner.model
        return tell(scheduler) | {LINEARS: linears_of(model)}

    Scheduler.get_init_info = tell_more
    server_args = args[0] if args else more["server_args"]
    if server_args.device == "cpu":
        from sglang.srt import batch_invariant_ops
        from sglang.srt.mem_cache.pool_host import common
        from sglang.srt.models import qwen2_moe

        allow_seeds_on_a_cpu()
        # The kernels of that mode are written in Triton, for GPUs. With torch's own kernels, which a CPU uses
        # instead, the last bits of a product depend on the batch.
        batch_invariant_ops.enable_batch_invariant_mode = lambda *_: None
        # The memory of recorded experts would be registered with CUDA.
        common._cuda_host_register = lambda *_: None
        qwen2_moe.fused_gate_sigmoid_mul_add = add_gated  # a kernel in Triton too
    run_scheduler_process(*args, **more)


def add_gated(x: Any, gate: Any, shared: Any, out: Any) -> None:
    """Adds to `out` [T, D], in place, what the expert that all tokens share says of `x`, `shared` [T, D], times
    its gate, whose weight is `gate` [D]; as SGLang's kernel does, in float32."""
    gates = (x.float() @ gate.float()).sigmoid()
    out += (gates[:, None] * shared.float()).to(out.dtype)


def linears_of(model: Any) -> dict[str, str]:
    from sglang.srt.layers.linear import LinearBase

    return {
        name: type(getattr(module, "scheme", None) or module.quant_method).__name__
        for name, module in model.named_modules()
        if isinstance(module, LinearBase) and ".layers." in name
    }


def allow_seeds_on_a_cpu() -> None:
    """Adds CPU attention to the backends that SGLang allows in its deterministic mode, without which it ignores
    a request's seed."""
    from sglang.srt.arg_groups.choices import (
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )

    add_deterministic_attention_backend_choices([CPU_ATTENTION])
    add_radix_supported_deterministic_attention_backend_choices([CPU_ATTENTION])


def _end_with_parent() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
