"""Models on low-bit numbers: quantized forward, FP8 training, LoRA on a quantized base, published tensors."""
