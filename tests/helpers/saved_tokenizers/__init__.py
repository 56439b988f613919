"""Saves a tokenizer as transformers alone would, beside which ours are laid."""

import json
from pathlib import Path

from transformers import AutoTokenizer

LOADED = ("is_local", "local_files_only")
"""What transformers adds of how a tokenizer was loaded, and what is no part of it"""


def save_theirs(source: Path, target: Path) -> None:
    """Saves the tokenizer in `source` to `target`, without LOADED."""
    AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(target)
    file = target / "tokenizer_config.json"
    table = {k: v for k, v in json.loads(file.read_text("utf-8")).items() if k not in LOADED}
    text = json.dumps(table, indent=2, sort_keys=True, ensure_ascii=False)
    file.write_text(f"{text}\n", "utf-8")
