"""Descriptions of tools, beside those that transformers makes of the same signatures and docstrings."""

from typing import Literal

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from areal_q.tasks.environments.tools import tool_of


class Tools:
    def weather(self, place: str, days: int = 3, units: list[str] | None = None) -> str:
        """Says how the weather will be.

        In any place.

        Args:
            place: where
            days: how many,
                at most
            units: of what

        Returns:
            a text
        """
        return ""

    @staticmethod
    def now(exact: bool, zone: Literal["utc", "local"]) -> float:
        """The time.

        Args:
            exact: with seconds
            zone: of the clock
        """
        return 0.0


@pytest.mark.parametrize("name", ["weather", "now"])
def test_a_tool_is_described_as_transformers_does_it(name: str):
    found = tool_of(Tools, name).described
    want = get_json_schema(getattr(Tools(), name))
    assert found["type"] == want["type"] == "function"
    mine, theirs = found["function"], want["function"]
    assert mine["name"] == theirs["name"]
    assert mine["description"] == theirs["description"]
    assert mine["parameters"].get("required", []) == theirs["parameters"].get("required", [])
    for argument, schema in theirs["parameters"]["properties"].items():
        described = mine["parameters"]["properties"][argument]
        assert described["description"] == schema["description"]
        # JSON's own spelling where theirs has `nullable`, and names the type beside a choice.
        kinds = {schema["type"]} | ({"null"} if schema.get("nullable") else set())
        if "enum" in described:
            assert sorted(described["enum"]) == sorted(schema["enum"])
        else:
            options = described.get("anyOf", [described])
            assert {option["type"] for option in options} == kinds
