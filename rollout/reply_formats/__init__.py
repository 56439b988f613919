"""How models write thoughts and calls of tools: parsers of replies, chosen by the chat template."""
