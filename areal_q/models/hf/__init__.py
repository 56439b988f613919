"""Hugging Face's layouts: model directories, adapters and quantized checkpoints."""
