import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = """\
{% for t in tools or [] %}<|im_start|>tool {{ t.function.name }}<|im_end|>
{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
demos = [json.loads(row) for row in Path("demos.jsonl").read_text().splitlines()]
raw, split = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(False, use_regex=False)
raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), split])
raw.decoder = decoders.ByteLevel()
ends = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
base = PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=TEMPLATE, **ends)
texts = [base.apply_chat_template(d["messages"], d["tools"], tokenize=False) for d in demos]
tokenizer = base.train_new_from_iterator(texts, 450)
tokenizer.chat_template = TEMPLATE
tokenizer.save_pretrained("adder")
config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=128, initializer_range=0.08, eos_token_id=1,
)  # fmt: skip
LlamaForCausalLM(config).save_pretrained("adder")
