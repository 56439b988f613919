"""docs/models.md says of each family whether it is taken: what `config.json` of a tiny model of it gives.

`PYTHONPATH=tests python tests/models/test_models_page.py` writes the page's table anew.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from helpers.kinds import FAMILIES, VARIANTS, config_of
from transformers import CONFIG_MAPPING, LlamaConfig

from areal_q.errors import CheckpointError, NotOurs
from areal_q.models import DecoderConfig
from areal_q.models.foreign import COMPUTED_BY, TRANSFORMERS
from areal_q.models.hf.foreign_files import check_cache

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
OTHERS = ("qwen3_moe", *FAMILIES, "falcon_h1", "minimax", "mamba")
"""Families of which no variant is in helpers/kinds.py."""


def answer(table: dict[str, Any]) -> str:
    """What becomes of a model: ours, transformers' as tests/models/test_foreign.py has it, or a refusal."""
    try:
        DecoderConfig.from_hf(table).validate()
        return "yes, natively"
    except NotOurs:
        pass
    try:
        config = DecoderConfig.from_hf(table | {COMPUTED_BY: TRANSFORMERS})
        check_cache(config)
    except CheckpointError as error:
        return f"no: `{error}`"
    return "yes, by transformers" if config.family in FAMILIES else "not tried"


def rows() -> list[str]:
    found = {name: config_of(name, SHAPE).to_dict() for name in VARIANTS}
    for name in OTHERS:
        if name in CONFIG_MAPPING:
            found[name] = CONFIG_MAPPING[name]().to_dict()
    by_length = {"rope_type": "dynamic", "factor": 2.0}
    found["llama, dynamic"] = LlamaConfig(**SHAPE, rope_parameters=by_length).to_dict()
    answers = {name: answer(table) for name, table in found.items()}
    foreign = [name for name, said in answers.items() if said == "yes, by transformers"]
    known = [f"| {name} | {said} |" for name, said in answers.items() if name not in foreign]
    return [*known, f"| {', '.join(foreign)} | yes, by transformers |"]


def test_the_page_says_what_is_taken() -> None:
    families, *_ = PAGE.read_text().split("\n## ")
    said = re.findall(r"^\| (?!family)[^-].* \|$", families, re.MULTILINE)
    assert said == rows()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_that_is_tested_is_taken(name: str) -> None:
    assert answer(config_of(name, SHAPE).to_dict()) == "yes, natively"


if __name__ == "__main__":
    text = PAGE.read_text()
    start, end = text.index("| --- | --- |\n") + 14, text.index("\n\n", text.index("| --- | --- |"))
    PAGE.write_text(text[:start] + "\n".join(rows()) + text[end:])
