"""Layers of Megatron's model that differ from Megatron's own."""
