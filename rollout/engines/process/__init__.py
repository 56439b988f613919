"""What vLLM and SGLang share: engines that generate in processes of their own."""
