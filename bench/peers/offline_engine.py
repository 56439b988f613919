"""vLLM or SGLang on a CPU as their own offline interfaces run them: a peer of bench/shapes/generation.py.

`python -m bench.peers.offline_engine SPEC.json`, in an environment that has the engine. Prints one JSON line:
tokens per second of CPU, of this process and of all that it started, by number of sequences.
"""

# pyright: reportMissingImports=false

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common import cpu_seconds

SECONDS = 2.0
"""CPU time of a measurement at least, since that of a process is known to 10 ms"""


def vllm(spec: dict[str, Any]) -> Callable[[list[list[int]]], Any]:
    """Returns what draws a response to each prompt."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from vllm import LLM, SamplingParams

    engine = LLM(
        spec["model"],
        dtype=spec["dtype"],
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=max(spec["sequences"]),
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,  # compiling takes minutes for each size of model
    )
    sampling = SamplingParams(
        temperature=1.0, max_tokens=spec["tokens"], ignore_eos=True, detokenize=False
    )
    return lambda prompts: engine.generate(
        [{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False
    )


def sglang(spec: dict[str, Any]) -> Callable[[list[list[int]]], Any]:
    """Returns what draws a response to each prompt."""
    import sglang

    engine = sglang.Engine(
        model_path=spec["model"],
        dtype=spec["dtype"],
        device="cpu",
        attention_backend="torch_native",
        skip_tokenizer_init=True,
        max_running_requests=max(spec["sequences"]),
        max_total_tokens=128 * max(spec["sequences"]),
        context_length=128,
    )
    sampling = {"temperature": 1.0, "max_new_tokens": spec["tokens"], "ignore_eos": True}
    return lambda prompts: engine.generate(input_ids=prompts, sampling_params=sampling)


def rate(generate: Callable[[list[list[int]]], Any], spec: dict[str, Any], sequences: int) -> float:
    """Returns tokens per CPU second, over SECONDS at least."""
    prompts, rounds, began = [spec["prompt"]] * sequences, 0, cpu_seconds(os.getpid())
    while (took := cpu_seconds(os.getpid()) - began) < SECONDS:
        generate(prompts)
        rounds += 1
    return rounds * sequences * spec["tokens"] / took


def main(spec: dict[str, Any]) -> None:
    generate = {"vllm": vllm, "sglang": sglang}[spec["engine"]](spec)
    rates = {}
    for sequences in spec["sequences"]:
        generate([spec["prompt"]] * sequences)
        rates[sequences] = max(rate(generate, spec, sequences) for _ in range(spec["repeats"]))
    print(json.dumps(rates), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
