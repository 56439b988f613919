"""Models that draw a text which a test has written: Markov chains in ordinary Hugging Face directories.

Each is a Llama of one layer whose attention and MLP are zero, so that a token's embedding alone decides what
follows it. The tokenizer has one token a byte, and special tokens.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT, TURN, END_OF_TURN, BOS, EOS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
)
CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)


def byte_tokenizer(
    eos: str = END_OF_TURN,
    template: str | None = CHATML,
    special: tuple[str, ...] = (),
    wrapped: bool = False,
) -> PreTrainedTokenizerFast:
    """Ids 0 … 255 are bytes, 256 … 260 the tokens above, and `special` follow. `wrapped` puts <s> before every
    text and </s> after it."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    names = [END_OF_TEXT, TURN, END_OF_TURN, BOS, EOS, *special]
    made.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names])
    if wrapped:
        ends = [(token, made.token_to_id(token)) for token in (BOS, EOS)]
        made.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A {EOS}", special_tokens=ends
        )
    hf = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=eos, clean_up_tokenization_spaces=False
    )
    if template:
        hf.chat_template = template
    return hf


def write_chain(
    directory: Path,
    text: str,
    hf: PreTrainedTokenizerFast | None = None,
    eos: int | list[int] | None = None,
    **files: Any,
) -> Path:
    """Writes a model that draws `text`, again and again. Its tokens must all differ, and a prompt must not end
    with one of them. `eos` is that of config.json; `files` are further JSON files, such as
    generation_config={"eos_token_id": 256}."""
    hf = hf or byte_tokenizer()
    chain = hf.encode(text, add_special_tokens=False)
    assert len(set(chain)) == len(chain), "a token of the chain has one successor"
    width = -(-len(hf) // 64) * 64
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(hf), hidden_size=width, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=width // 32, num_key_value_heads=1, head_dim=32,
            max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=eos,
        )
    )  # fmt: skip
    follows = dict.fromkeys(range(len(hf)), chain[0]) | dict(itertools.pairwise(chain))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        for token, after in follows.items():
            model.model.embed_tokens.weight[token, token] = 1.0
            model.lm_head.weight[after, token] = 4.0
    model.generation_config.eos_token_id = None
    model.bfloat16().save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    hf.save_pretrained(directory)
    for name, table in files.items():
        (directory / f"{name}.json").write_text(json.dumps(table))
    return directory
