"""docs/models.md says of each family whether it is taken: what `config.json` of a tiny model of it gives.

`PYTHONPATH=tests python tests/models/test_models_page.py` writes the page's table anew.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from helpers.kinds import VARIANTS, config_of
from transformers import CONFIG_MAPPING

from areal_q.errors import CheckpointError
from areal_q.models import DecoderConfig

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
OTHERS = (
    "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text", "phi3", "granite", "olmo2", "olmo3", "gpt_oss",
    "deepseek_v3", "glm4", "qwen2_moe", "qwen3_next", "falcon_h1", "stablelm", "starcoder2", "cohere2",
    "exaone4", "ernie4_5", "hunyuan_v1_dense", "arcee",
)  # fmt: skip
"""Families of which no variant is in helpers/kinds.py."""


def answer(table: dict[str, Any]) -> str:
    try:
        DecoderConfig.from_hf(table).validate()
    except CheckpointError as error:
        return f"no: `{error}`"
    return "yes"


def rows() -> list[str]:
    found = {name: config_of(name, SHAPE).to_dict() for name in VARIANTS}
    for name in OTHERS:
        if name in CONFIG_MAPPING:
            found[name] = CONFIG_MAPPING[name]().to_dict()
    answers = {name: answer(table) for name, table in found.items()}
    unknown = [name for name, said in answers.items() if "is none of" in said]
    known = [f"| {name} | {said} |" for name, said in answers.items() if name not in unknown]
    refused = answers[unknown[0]].replace(unknown[0], "…")
    return [*known, f"| {', '.join(unknown)} | {refused} |"]


def test_the_page_says_what_is_taken() -> None:
    said = re.findall(r"^\| (?!family)[^-].* \|$", PAGE.read_text(), re.MULTILINE)
    assert said == rows()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_that_is_tested_is_taken(name: str) -> None:
    assert answer(config_of(name, SHAPE).to_dict()) == "yes"


if __name__ == "__main__":
    text = PAGE.read_text()
    start, end = text.index("| --- | --- |\n") + 14, text.index("\n\n", text.index("| --- | --- |"))
    PAGE.write_text(text[:start] + "\n".join(rows()) + text[end:])
