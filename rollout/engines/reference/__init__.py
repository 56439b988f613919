"""The reference engine in torch: continuous batching over a slotted KV cache."""
