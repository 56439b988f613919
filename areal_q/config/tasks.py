"""What is learnt: one Struct per task, chosen by `type`."""

from typing import Literal

from msgspec import Struct

from areal_q.config.bounds import Count, Fraction


class _Task(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class Arithmetic(_Task, frozen=True, kw_only=True, tag="arithmetic"):
    """Additions `12+34=`, answered least significant digit first (`64`): the small model's first subject."""

    digits: Count = 2
    reversed: bool = True
    heldout: Count = 512
    """Problems kept for evaluation, never trained on."""


class Calculator(_Task, frozen=True, kw_only=True, tag="calculator"):
    """The calculator annotations in GSM8K's own file: `<<16-3-4=9>>` asks `16-3-4=`, expects `9`."""

    path: str
    heldout: Fraction = 0.1
    """The last share of the problems in the file, never trained on."""


class Gsm8k(_Task, frozen=True, kw_only=True, tag="gsm8k"):
    """GSM8K word problems from JSONL lines with `question` and `answer` (the final line `#### n`)."""

    path: str
    """A JSONL file, or a Hugging Face dataset id such as `openai/gsm8k` (needs the network)."""
    heldout: Fraction = 0.1
    template: Literal["chat", "plain"] = "chat"
    """`chat`: the tokenizer's own chat template; `plain`: question and answer as bare text."""


TaskConfig = Arithmetic | Calculator | Gsm8k
