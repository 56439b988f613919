"""Other ways to say a chat over HTTP: OpenAI's responses and Anthropic's messages. Each turns its request into
one for a chat, and writes the reply in its own blocks."""
