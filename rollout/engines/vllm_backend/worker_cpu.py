"""Changes to vLLM's worker on a CPU: the kernel for INT8 on processors with AMX (cpu_kernels.py says why), and
the seeded draws after prompts that take several steps."""

# pyright: reportMissingImports=false

from typing import Any

import torch
import vllm.model_executor.kernels.linear.scaled_mm.cpu as scaled_mm


def keep_float32_off_sgl() -> None:
    """Makes vLLM compute INT8 layers with float32 activations by oneDNN's product.

    With AMX it chooses SGL's product by the dtype of the weights alone, and the first product with float32
    activations then ends the engine. The activations' dtype is known here as torch's default dtype, under which
    vLLM builds its layers.
    """
    offered = scaled_mm.check_cpu_sgl_kernel

    def check(n: int, k: int, dtype: torch.dtype) -> bool:
        return torch.get_default_dtype() != torch.float32 and offered(n, k, dtype)

    scaled_mm.check_cpu_sgl_kernel = check


def draw_discarded_tokens_without_seed() -> None:
    """Makes vLLM draw a token that it discards without the request's generator.

    A prompt that does not fit into one step yields such a token after each of its parts except the last. vLLM
    draws it from the generator and then resets the generator's offset, which a generator on a CPU does not
    have, so that the engine ends. If the generator is left alone, a seed gives the same response however the
    prompt is divided.
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
