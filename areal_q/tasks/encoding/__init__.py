"""Text and conversations as token ids: tokenizers, chat templates, transcripts. Imports no torch."""
