"""Changes to vLLM's worker on a CPU: the kernel for INT8 on processors with AMX (cpu_kernels.py says why), the
seeded draws after prompts that take several steps, and equal logits at the edge of the largest top_k."""

# pyright: reportMissingImports=false

from typing import Any

import torch
import vllm.model_executor.kernels.linear.scaled_mm.cpu as scaled_mm
import vllm.v1.sample.ops.topk_topp_sampler as topk_topp_sampler


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


def keep_no_more_than_top_k() -> None:
    """Makes vLLM's top_k keep k tokens where others have the logit of the k-th, as its kernel for a GPU does.

    On a CPU it would keep all of those, and what a token was drawn from would not be among the k log-probs that
    are asked for. Logits in bfloat16 are often equal. Of equal ones the smallest ids are kept, whatever other
    requests ask for.
    """
    cut = topk_topp_sampler.apply_top_k_top_p

    def apply(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
        if k is not None:
            rows = (k < logits.shape[1]).nonzero().squeeze(1)
            of, x = k[rows].long().unsqueeze(1), logits[rows]
            kth = x.topk(int(of.max()), 1).values.gather(1, of - 1)
            above, tie = x > kth, x == kth
            tie &= tie.cumsum(1) <= of - above.sum(1, keepdim=True)
            logits[rows] = x.masked_fill(~(above | tie), -torch.inf)
        return cut(logits, None, p)

    topk_topp_sampler.apply_top_k_top_p = apply
