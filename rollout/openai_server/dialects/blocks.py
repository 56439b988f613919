"""A reply as blocks: a thought, a text, a call, in the order of the reply. Both dialects write such blocks, and
announce in a stream where one opens, grows and closes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rollout.openai_server.schema import Told


@dataclass
class Block:
    """One block of a reply, as far as it is known."""

    index: int
    kind: Literal["content", "reasoning", "call"]
    id: str
    name: str = ""
    """The function that a call names"""
    text: str = ""
    """Its text, or a call's arguments, a JSON object"""
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
    """The word of `/v1/responses` for it: a text or thought that the limit has cut off stays incomplete"""


Change = tuple[Literal["opens", "grows", "closes"], Block, str]
"""What happens to a block, and the text that is new in it"""


class Blocks:
    """The blocks of one reply, which grow with what is told of it."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open = False

    def add(self, told: Told) -> Iterator[Change]:
        """Adds what is new, and yields the changes one by one."""
        calls = iter(told.tool_calls())
        for part in told.parts:
            if not part.text and part.kind != "call":
                continue
            if part.kind == "call" or not self._open or self.all[-1].kind != part.kind:
                yield from self.close()
                id = next(calls)["id"] if part.kind == "call" else f"{told.key}t{len(self.all):03}"
                self.all.append(Block(len(self.all), part.kind, id, part.name))
                self._open = True
                yield "opens", self.all[-1], ""
            self.all[-1].text += part.text
            yield "grows", self.all[-1], part.text

    def close(self, finish_reason: str | None = None) -> Iterator[Change]:
        """Closes the last block, if one is open; the reason is given where the reply has ended with it."""
        if self._open:
            self._open = False
            cut = finish_reason == "length" and self.all[-1].kind != "call"
            self.all[-1].status = "incomplete" if cut else "completed"
            yield "closes", self.all[-1], ""

    def of_whole(self, told: Told) -> list[Block]:
        """Returns the blocks of a whole reply, which is all that was told."""
        for _ in (*self.add(told), *self.close(told.finish_reason)):
            pass
        return self.all
