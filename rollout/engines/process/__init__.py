"""Engines that generate in processes of their own: what vLLM and SGLang share."""
