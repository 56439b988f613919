"""What vLLM's worker does otherwise on a CPU: the product that it takes for INT8 with AMX, of which
rollout/engines/vllm_backend/cpu_kernels.py says why, and the seeds of prompts that take several steps."""

# pyright: reportMissingImports=false

from typing import Any

import torch
import vllm.model_executor.kernels.linear.scaled_mm.cpu as scaled_mm


def keep_float32_off_sgl() -> None:
    """Makes vLLM build INT8 layers whose activations are float32 on oneDNN's product.

    With AMX it takes SGL's for all of them and asks for the weights' dtype only; the first product of float32
    activations then ends the engine. Layers are built under the activations' dtype as torch's default.
    """
    offered = scaled_mm.check_cpu_sgl_kernel

    def check(n: int, k: int, dtype: torch.dtype) -> bool:
        return torch.get_default_dtype() != torch.float32 and offered(n, k, dtype)

    scaled_mm.check_cpu_sgl_kernel = check


def draw_discarded_tokens_without_seed() -> None:
    """Makes vLLM draw a token that it discards without the request's generator.

    A prompt that does not fit into one step yields such a token after each part but the last. vLLM draws it
    from the generator and then turns that back by its offset, which a generator on a CPU has not: the engine
    ends. Where the generator is not touched, a seed gives the same response in whatever parts the prompt is
    computed.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample = CPUModelRunner.sample_tokens

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        batch = self.input_batch
        discarded = self.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        aside = {i: batch.generators.pop(i) for i in discarded if i in batch.generators}
        try:
            return sample(self, grammar_output)
        finally:
            batch.generators.update(aside)

    CPUModelRunner.sample_tokens = sample_tokens
