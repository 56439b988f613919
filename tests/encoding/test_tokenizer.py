"""Our character tokenizer against `transformers.AutoTokenizer`, and the wrapper of the latter."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.saved_tokenizers import LOADED, save_theirs
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from areal_q.config import Arithmetic, Chat, PretrainedModel, SmallModel
from areal_q.errors import CheckpointError, ConfigError, TaskError
from areal_q.models.config import FAMILIES
from areal_q.tasks import CharTokenizer, HFTokenizer, build_tokenizer, load_tokenizer
from areal_q.tasks.datasets.calculator import EXPRESSION, parse_number
from areal_q.tasks.encoding.tokenizer import CHARACTERS

TEMPLATE = "{% for m in messages %}({{ m['content'] }}){% endfor %}{% if add_generation_prompt %}={% endif %}"

CLASSES = [
    "TokenizersBackend",
    "PreTrainedTokenizerFast",
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
    "Qwen2Tokenizer",
    "Qwen2TokenizerFast",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    CharTokenizer().save(str(path))
    return path


@pytest.fixture(scope="module")
def chat_directory(tmp_path_factory: pytest.TempPathFactory, directory: Path) -> Path:
    path = tmp_path_factory.mktemp("chat")
    hf = AutoTokenizer.from_pretrained(directory)
    hf.chat_template = TEMPLATE
    hf.add_tokens(["!"])
    hf.save_pretrained(path)
    return path


def bpe_directory(path: Path, family: str, **settings: Any) -> Path:
    """Returns a model's directory without weights, whose tokenizer is of bytes, as those of GPT-2 and Qwen."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(["what is the sum of 12 and 34, and of both? " * 9], trainer)
    bpe.save(str(path / "tokenizer.json"))
    settings |= {"eos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text(json.dumps({"model_type": family}))
    return path


@given(text=st.text(alphabet=CHARACTERS))
def test_characters_round_trip(text: str) -> None:
    tokenizer = CharTokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode([tokenizer.pad_id, *ids, tokenizer.eos_id]) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_transformers_reads_the_same_ids(directory: Path) -> None:
    ours, hf = CharTokenizer(), AutoTokenizer.from_pretrained(directory)
    assert len(hf) == ours.vocab_size
    assert (hf.eos_token_id, hf.pad_token_id) == (ours.eos_id, ours.pad_id)
    for text in (CHARACTERS, "12+34=", "  1 , 000 .5 ", "(1-2)*3/4%"):
        assert hf(text)["input_ids"] == ours.encode(text)
        assert hf.decode([*ours.encode(text), ours.eos_id], skip_special_tokens=True) == text


def test_an_unknown_character_is_named_with_its_text(directory: Path) -> None:
    with pytest.raises(TaskError, match=r"'x' of '12x3='.* reads only .*model\.path=DIR"):
        CharTokenizer().encode_prompt("12x3=")


def test_every_well_formed_calculator_annotation_can_be_encoded() -> None:
    for c in map(chr, range(0x250)):
        if EXPRESSION.fullmatch(f"{c}1") or parse_number(f"1{c}0") or parse_number(f"{c}1"):
            assert c.isspace() or c in CHARACTERS


def test_load_tokenizer_knows_its_own_without_transformers(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert isinstance(load_tokenizer(directory), CharTokenizer)


def test_without_transformers_the_extra_is_named(
    chat_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[hf\]"):
        load_tokenizer(chat_directory)


def test_a_hugging_face_tokenizer_applies_the_chat_template(chat_directory: Path) -> None:
    tokenizer = load_tokenizer(chat_directory, Chat())
    assert isinstance(tokenizer, HFTokenizer)
    assert tokenizer.encode_prompt("1+1") == CharTokenizer().encode("(1+1)=")
    assert tokenizer.encode("1+1") == CharTokenizer().encode("1+1")
    assert tokenizer.vocab_size == CharTokenizer().vocab_size + 1


def test_plain_prompts_are_bare_text(chat_directory: Path) -> None:
    tokenizer = load_tokenizer(chat_directory)
    assert tokenizer.encode_prompt("1+1=") == CharTokenizer().encode("1+1=")
    assert tokenizer.decode([*tokenizer.encode("1+1="), tokenizer.eos_id]) == "1+1=<eos>"


def test_a_saved_hugging_face_tokenizer_loads_again(chat_directory: Path, tmp_path: Path) -> None:
    load_tokenizer(chat_directory, Chat()).save(str(tmp_path))
    assert load_tokenizer(tmp_path, Chat()).encode_prompt("2") == CharTokenizer().encode("(2)=")


def test_a_saved_tokenizer_does_not_tell_how_it_was_loaded(
    chat_directory: Path, tmp_path: Path
) -> None:
    load_tokenizer(chat_directory, Chat()).save(str(tmp_path))
    table = json.loads((tmp_path / "tokenizer_config.json").read_text())
    theirs = json.loads((chat_directory / "tokenizer_config.json").read_text())
    assert table == {name: theirs[name] for name in theirs.keys() - LOADED}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [*CLASSES, "LlamaTokenizerFast", "PreTrainedTokenizer", None])
def test_a_tokenizer_is_the_one_of_auto_tokenizer(tmp_path: Path, family: str, name: str) -> None:
    read, ours, theirs = (tmp_path / name for name in ("read", "ours", "theirs"))
    for directory in (read, ours):
        directory.mkdir()
    bpe_directory(read, family, **({"tokenizer_class": name} if name else {}))
    load_tokenizer(read).save(str(ours))
    save_theirs(read, theirs)
    saved = [{file.name: file.read_bytes() for file in d.iterdir()} for d in (ours, theirs)]
    assert saved[0] == saved[1]
    assert len(saved[0]) > 1


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_a_tokenizer_whose_class_is_named_needs_no_torch(tmp_path: Path, name: str) -> None:
    bpe_directory(tmp_path, "qwen3", tokenizer_class=name, chat_template=TEMPLATE)
    program = (
        "import sys\nfrom areal_q.config import Chat\nfrom areal_q.tasks import load_tokenizer\n"
        f"tokenizer = load_tokenizer({str(tmp_path)!r}, Chat())\n"
        "print(tokenizer.decode(tokenizer.encode_prompt('1+1')), 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert said.stdout == b"(1+1)= False\n"


def test_chat_without_a_chat_template_is_refused(chat_directory: Path, tmp_path: Path) -> None:
    hf = AutoTokenizer.from_pretrained(chat_directory)
    hf.chat_template = None
    hf.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no chat template; use task.template=plain"):
        load_tokenizer(tmp_path, Chat())


def test_a_tokenizer_without_an_end_of_text_token_is_refused(
    chat_directory: Path, tmp_path: Path
) -> None:
    hf = AutoTokenizer.from_pretrained(chat_directory)
    hf.eos_token = None
    hf.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no end-of-text token"):
        load_tokenizer(tmp_path)


def test_a_missing_or_empty_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=f"^{tmp_path}: no tokenizer can be read: "):
        load_tokenizer(tmp_path)


def test_a_tokenizer_file_of_another_version_is_one_line(
    chat_directory: Path, tmp_path: Path
) -> None:
    load_tokenizer(chat_directory).save(str(tmp_path))
    file = tmp_path / "tokenizer.json"
    for change in ({"type": "NEWBPE"}, {"type": "BPE", "vocab": 3}, []):
        table = json.loads(file.read_text()) | {"model": change}
        file.write_text(json.dumps(table))
        with pytest.raises(
            CheckpointError, match=f"^{tmp_path}: no tokenizer can be read: [^\n]+$"
        ):
            load_tokenizer(tmp_path)


def test_what_transformers_says_is_not_cut_off_at_its_colon(
    chat_directory: Path, tmp_path: Path
) -> None:
    """Its tokenizers read config.json, too."""
    load_tokenizer(chat_directory).save(str(tmp_path))
    table = {"model_type": "qwen2", "num_hidden_layers": 9, "layer_types": ["full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=r"no tokenizer can be read: .*: .*[^:]$"):
        load_tokenizer(tmp_path)


def test_the_model_decides_which_tokenizer_is_built(directory: Path, chat_directory: Path) -> None:
    assert isinstance(build_tokenizer(SmallModel(), Arithmetic()), CharTokenizer)
    pretrained = PretrainedModel(path=str(chat_directory))
    assert isinstance(build_tokenizer(pretrained, Arithmetic()), HFTokenizer)
