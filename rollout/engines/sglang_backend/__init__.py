"""SGLang as a generation backend."""
