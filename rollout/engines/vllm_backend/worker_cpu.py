"""The product that vLLM's worker takes for INT8 on a CPU with AMX: rollout/engines/vllm_backend/cpu_kernels.py
says why."""

# pyright: reportMissingImports=false

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
