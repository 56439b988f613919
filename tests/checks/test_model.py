"""What a pretrained model, its tokenizer and the settings make impossible is refused before a weight is read,
and by the learner in the same words."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.openai_server.scripted import TEMPLATE
from helpers.paths import ROOT
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from areal_q.checks.automatic import settled, why_rate
from areal_q.checks.format_advice import format_of, instead
from areal_q.checks.memory import learner_memory, memory_of, total, worker_memory
from areal_q.checks.model import check_model, findings, longest_prompt, rate_of
from areal_q.checks.pass_memory import Lengths
from areal_q.config import Run, dump_toml, load, override
from areal_q.config.tasks import chat_of
from areal_q.errors import UserError
from areal_q.models import Decoder, DecoderConfig, init_weights, load_config, save_decoder
from areal_q.models.shape import shape_of
from areal_q.system.processes import module_command
from areal_q.tasks import CharTokenizer, load_tokenizer
from learner.build import build_learner
from rollout.commands.check import model_of
from rollout.environments.engine_client import EngineClient
from rollout.environments.own_environment import OwnTurns

SHAPE: dict[str, Any] = {
    "family": "qwen3", "vocab_size": 260, "width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16,
    "mlp": 48, "max_positions": 64,
}  # fmt: skip


def write_model(path: Path, tokenizer: Path, **shape: Any) -> None:
    model = Decoder(DecoderConfig(**SHAPE | shape))
    init_weights(model, 0)
    save_decoder(model, path, load_tokenizer(tokenizer))


def run_of(path: Path, *overrides: str) -> Run:
    rows = [{"prompt": f"say {i}", "answer": f"{i}"} for i in reversed(range(20))]
    (path.parent / "task.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {"type": "jsonl", "path": str(path.parent / "task.jsonl"), "template": "chat"}
    settings = [f"task.{name}={value}" for name, value in task.items()]
    settings += ["model.type=pretrained", f"model.path={path}", "rollout.sampling.max_tokens=8"]
    return load(None, [*settings, *overrides])


@pytest.fixture
def model(tmp_path: Path, byte_tokenizer: Path) -> Path:
    write_model(tmp_path / "model", byte_tokenizer)
    return tmp_path / "model"


def told(run: Run) -> dict[str, str]:
    return {
        f.name: f"{f.says} → {f.fix}" for f in findings(run, check_model(run)) if f.level != "ok"
    }


def test_a_chat_template_that_is_not_asked_with_is_told(model: Path):
    assert "template" not in told(run_of(model))
    assert 'task.template = "chat"' in told(run_of(model, "task.template=plain"))["template"]


def test_more_tokens_than_the_model_has_positions_name_them(model: Path):
    with pytest.raises(
        UserError, match=r"max_tokens = 100000 and a prompt .* the model's 64 positions"
    ):
        check_model(run_of(model, "rollout.sampling.max_tokens=100000"))


def test_a_cache_without_room_is_named_with_its_settings(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    free = [1 << 50]
    monkeypatch.setattr("areal_q.checks.memory.available_bytes", lambda: free[0])
    large = [
        "rollout.engine.slots=5000", "learner.groups=5000", "rollout.sampling.max_tokens=40",
        "learner.microbatch_tokens=64",
    ]  # fmt: skip
    run = run_of(model, *large, "rollout.workers=1")
    found = check_model(run)
    lengths = Lengths(len(found.prompt), 40)
    parts = [*learner_memory(run, found.shape, lengths), *worker_memory(run, found.shape, lengths)]
    assert "memory" not in told(run)
    free[0] = total(parts) - 1
    slots = "a smaller rollout.engine.slots or rollout.sampling.max_tokens (now 40)"
    assert slots in told(run)["memory"]
    cache = next(part for part in parts if part.name == "KV cache")
    bounded = run_of(model, *large, f"rollout.engine.kv_cache_bytes={int(cache.nbytes) - 1}")
    free[0] = total(parts) - int(cache.nbytes) + 1
    assert "a smaller rollout.engine.kv_cache_bytes" in told(bounded)["memory"]
    free[0] = 1
    assert "a smaller model" in told(run)["memory"]


def without_a_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file(
        {k: v for k, v in tensors.items() if k != "model.norm.weight"}, path / "model.safetensors"
    )


def another_head(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, path / "model.safetensors")


def a_small_embedding(path: Path) -> None:
    tokenizer = path.rename(path.parent / "tokenizer")
    write_model(path, tokenizer, vocab_size=200)


def a_raising_template(path: Path) -> None:
    hf = AutoTokenizer.from_pretrained(path)
    hf.chat_template = "{{ raise_exception('only poems, please') }}"
    hf.save_pretrained(path)


def no_template(path: Path) -> None:
    hf = AutoTokenizer.from_pretrained(path)
    hf.chat_template = None
    for file in path.glob("chat_template*"):
        file.unlink()
    hf.save_pretrained(path)


def another_tokenizer_version(path: Path) -> None:
    table = json.loads((path / "tokenizer.json").read_text()) | {"model": {"type": "NEWBPE"}}
    (path / "tokenizer.json").write_text(json.dumps(table))


def no_tokenizer(path: Path) -> None:
    for file in path.glob("tokenizer*"):
        file.unlink()


def no_vocabulary(path: Path) -> None:
    (path / "tokenizer.json").unlink()


def a_pointer(path: Path) -> None:
    said = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 269060552\n"
    (path / "model.safetensors").write_text(said)


def another_family(path: Path, family: str = "gemma2") -> None:
    table = json.loads((path / "config.json").read_text()) | {"model_type": family}
    (path / "config.json").write_text(json.dumps(table))


def an_adapter(path: Path) -> None:
    no_tokenizer(path)
    (path / "config.json").rename(path / "adapter_config.json")


def an_odd_width(path: Path) -> None:
    tokenizer = path.rename(path.parent / "tokenizer")
    write_model(path, tokenizer, mlp=33)


REFUSED: list[tuple[Callable[[Path], None], list[str], str]] = [
    (without_a_tensor, [], r"model: tensor model\.norm\.weight is missing \(1 in all\)"),
    (another_head, [], r"lm_head\.weight is not the embedding, though config\.json says"),
    (
        a_small_embedding,
        [],
        r"not that of the model: it has 257 tokens, the embedding 200, which lacks",
    ),
    (a_raising_template, [], r"only poems, please"),
    (no_template, [], r"the tokenizer has no chat template; use task\.template=plain, or"),
    (another_tokenizer_version, [], r"model: no tokenizer can be read: data did not match"),
    (no_tokenizer, [], r"model: no tokenizer can be read: the directory has no vocabulary"),
    (no_vocabulary, [], r"model: no tokenizer can be read: the directory has no vocabulary"),
    (a_pointer, [], r"model\.safetensors: a pointer of Git LFS, not the weights: git lfs pull"),
    (no_tokenizer, ["task.template=plain"], r"model: no tokenizer can be read"),
    (an_adapter, [], r"model: an adapter alone is no model: merge it into its base"),
    (another_family, [], r"config\.json: model_type 'gemma2' is none of"),
    (an_odd_width, ["rollout.format=mxfp4"], r"rollout\.format = 'mxfp4': .*down_proj.*33 inputs"),
    (
        lambda path: None,
        ["rollout.sampling.max_tokens=64"],
        r"max_tokens = 64 and a prompt do not fit into the model's 64 positions",
    ),
    (
        lambda path: None,
        ["rollout.sampling.max_tokens=58"],
        r"every prompt .* more than 6 tokens; rollout.sampling.max_tokens leaves",
    ),
]


@pytest.mark.parametrize(("damage", "settings", "complaint"), REFUSED)
def test_a_model_that_cannot_be_trained_is_refused_unread(
    model: Path, damage: Callable[[Path], None], settings: list[str], complaint: str
):
    check_model(run_of(model))
    damage(model)
    run = run_of(model, *settings)
    with pytest.raises(UserError, match=complaint) as early:
        check_model(run)
    (line,) = early.value.lines()
    with pytest.raises(UserError) as late:
        build_learner(
            run, model.parent, "redis://127.0.0.1:1", "tcp://127.0.0.1:*", "tcp://127.0.0.1:*",
            False, threading.Event(),
        )  # fmt: skip
    assert late.value.lines() == [line]


def test_what_is_found_is_what_the_run_will_use(model: Path):
    found = check_model(run_of(model))
    assert found.tokenizer.decode(found.prompt) == "<say 19>"
    assert (found.longest, found.problems, found.left_out) == (56, 20, 0)
    assert found.shape == shape_of(run_of(model).model, found.tokenizer)
    narrow = check_model(run_of(model, "rollout.sampling.max_tokens=57"))
    assert (narrow.longest, narrow.left_out) == (7, 10)


def test_findings_name_what_stops_a_reply_and_what_is_left_out(model: Path):
    run = run_of(model, "rollout.sampling.max_tokens=57")
    said = {one.name: (one.level, one.says) for one in findings(run, check_model(run))}
    assert said["model"] == ("ok", f"{model}: qwen3, 16,128 parameters, 64 positions")
    stops = "stops at <eos> (tokenizer, generation_config.json)"
    assert said["tokenizer"] == ("ok", f"257 tokens, embedding 260; {stops}")
    assert said["prompt"] == ("ok", "8 tokens: '<say 19>'")
    level, says = said["prompts"]
    assert level == "warning" and "7 tokens fit before 57 more; 10 of 20 are longer" in says


def test_areal_q_check_refuses_a_model_in_the_words_of_the_run(model: Path):
    smoothed = run_of(model, "rollout.smoothing.alpha=0.5")
    assert {one.level for one in model_of(smoothed)} == {"ok"}
    another_family(model)
    with pytest.raises(UserError) as refused:
        check_model(run_of(model))
    (found,) = model_of(run_of(model))
    assert (found.level, found.says) == ("error", str(refused.value))


@pytest.mark.parametrize(("free", "level"), [(1 << 40, "ok"), (1 << 30, "warning")])
def test_a_machine_with_too_little_memory_is_a_warning(
    model: Path, monkeypatch: pytest.MonkeyPatch, free: int, level: str
):
    monkeypatch.setattr("areal_q.checks.memory.available_bytes", lambda: free)
    run = run_of(model)
    (found,) = (one for one in model_of(run) if one.name == "memory")
    assert found.level == level and "available" in found.says


def test_what_takes_the_memory_is_what_is_advised(model: Path, monkeypatch: pytest.MonkeyPatch):
    """A pass of thousands of responses is by far the largest part: a half of it, or a quarter, fits."""
    run = run_of(model, "learner.groups=512", "learner.group_size=8", "rollout.engine.slots=8")
    lengths = Lengths(8, run.rollout.tokens_after_prompt)
    taken = total(learner_memory(run, LARGE, lengths)) + total(worker_memory(run, LARGE, lengths))
    monkeypatch.setattr("areal_q.checks.memory.available_bytes", lambda: taken - (1 << 30))
    (found,) = memory_of(run, LARGE, 8)
    assert found.level == "warning" and " are for a pass of the learner" in found.says
    (advised,) = re.findall(r"^learner.microbatch_tokens=[0-9]+", found.fix)
    (better,) = memory_of(override(run, advised), LARGE, 8)
    assert better.level == "ok", better
    (none,) = memory_of(override(run, "learner.microbatch_tokens=64"), LARGE, 8)
    assert "microbatch_tokens" not in none.fix


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        (["rollout.format=int8"], None),
        (
            ["rollout.format=int8", "rollout.smoothing=off"],
            "rollout.smoothing.alpha=0.5 or rollout.format=int8-weight",
        ),
        (["rollout.format=fp8"], "rollout.format=int8-weight"),
        (["rollout.format=int8", "rollout.smoothing.alpha=0.5"], None),
        (["rollout.format=int8-weight"], None),
        (
            ["rollout.format=int8", "learner.precision=qarl"],
            "rollout.smoothing.alpha=0.5 or rollout.format=int8-weight",
        ),
        (
            ["rollout.format=int8", "learner.precision=qarl", "rollout.smoothing.alpha=0.5"],
            None,
        ),
        (["rollout.format=int8", "learner.lora={}"], "rollout.format=int8-weight"),
        (["rollout.format=int4-g32"], "rollout.smoothing.alpha=0.5 learner.precision=qarl"),
        (["rollout.format=nf4"], "learner.precision=qarl"),
        (
            ["rollout.format=nf4", "learner.objective.type=mis"],
            "learner.precision=qarl learner.objective.type=acr",
        ),
        (
            ["rollout.format=nf4", "learner.objective.type=naive", "learner.precision=qarl"],
            None,
        ),
        (["rollout.format=int4"], "rollout.smoothing.alpha=0.5 learner.precision=qarl"),
        (["rollout.format=int4", "rollout.smoothing={}"], "learner.precision=qarl"),
        (["rollout.format=nvfp4"], "learner.precision=qarl"),
        (["rollout.format=nvfp4", "learner.lora={}"], None),
        (
            ["rollout.format=int4-fp8"],
            "rollout.format=int4 rollout.smoothing.alpha=0.5 learner.precision=qarl",
        ),
    ],
)
def test_a_format_known_to_fall_behind_is_a_warning(
    model: Path, settings: list[str], fix: str | None
):
    run = run_of(model, *settings)
    (found,) = (one for one in model_of(run) if one.name == "format")
    assert (found.level, found.fix) == (("warning", fix) if fix else ("ok", ""))
    for advised in fix.split(" or ") if fix else ():
        (better,) = format_of(override(run, *advised.split()))
        assert better.level == "ok", better


LARGE = DecoderConfig(
    family="llama", vocab_size=49_152, width=576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp=1536,
    max_positions=8192, tied=True,
)  # fmt: skip
"""That of SmolLM2-135M"""


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs").glob("*.toml")))
def test_no_configuration_of_ours_is_warned_of(name: str):
    run = load(ROOT / "configs" / name)
    assert all(one.level == "ok" for one in (*format_of(run), *rate_of(run, LARGE)))


def test_a_rate_for_small_models_is_a_warning(model: Path):
    run = run_of(model, "learner.optimizer.lr=1.5e-4")
    (found,) = rate_of(run, LARGE)
    assert (found.level, found.fix) == ("warning", "learner.optimizer.lr=1e-6 to 1e-5")
    assert "134,515,008 parameters" in found.says
    assert not [*rate_of(run, load_config(model))]
    for setting in ("learner.optimizer.lr=1e-5", "learner.lora={}"):
        assert not [*rate_of(override(run, setting), LARGE)]
    (chosen,) = rate_of(override(run, "learner.optimizer.lr=auto"), LARGE)
    assert (chosen.level, chosen.says) == ("ok", why_rate(run_of(model)))


def test_smoothing_is_not_advised_to_a_model_without_scales(model: Path):
    run = run_of(model, "rollout.format=int8", "learner.uaq=1")
    another_family(model, "gemma3_text")
    (found,) = format_of(run)
    assert (found.level, found.fix) == ("warning", "rollout.format=int8-weight")


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (["rollout.format=bf16"], ""),
        (["rollout.format=int8-weight"], "learner.precision=qarl"),
        (["rollout.format=int8-weight", "learner.precision=qarl"], ""),
        (["model.type=hf", "rollout.format=int8-weight"], "learner.precision=qarl"),
        (["model.type=hf", "rollout.format=nvfp4"], "learner.precision=qarl"),
        (
            ["model.type=hf", "rollout.format=int4"],
            "rollout.smoothing.alpha=0.5 learner.precision=qarl",
        ),
        (
            ["rollout.format=fp8", "learner.precision=jet"],
            "rollout.format=int8-weight learner.precision=full",
        ),
    ],
)
def test_advice_names_only_what_may_be_set_and_is_not(
    model: Path, settings: list[str], advice: str
):
    run = run_of(model, *settings, f"model.path={model}")
    assert instead(run) == advice
    for advised in advice.split(" or ") if advice else ():
        better = override(run, *advised.split())
        assert better != run
        check_model(override(settled(better), "learner.uaq=1"))


def test_the_preflight_says_what_is_known_and_what_to_take(model: Path):
    settings = dump_toml(run_of(model, "rollout.format=int8", "rollout.smoothing=off"))
    done = subprocess.run(
        module_command("areal_q.checks"), input=settings, capture_output=True, text=True, check=True
    )
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("warning: format: int8, "))
    assert "learnt sums to 0.72 with it, with bf16 to 0.77 (100 steps, " in line
    assert line.endswith("; take rollout.smoothing.alpha=0.5 or rollout.format=int8-weight")


def test_a_pretrained_model_is_read_without_torch(model: Path):
    code = "import sys; from areal_q.checks.__main__ import main; main(); print('torch' in sys.modules)"
    settings = dump_toml(run_of(model, "rollout.format=mxfp4"))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=settings, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False" and "tokenizer: 257 tokens" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_refused_model_leaves_an_earlier_run_where_it_is(model: Path):
    without_a_tensor(model)
    (model.parent / "runs" / "run").mkdir(parents=True)
    (model.parent / "run.toml").write_text(dump_toml(run_of(model)))
    done = subprocess.run(
        module_command("areal_q", "run", "run.toml"),
        cwd=model.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    missing = f"{model}: tensor model.norm.weight is missing (1 in all)"
    assert done.stderr == f"areal-q: error: {missing}\n"
    assert [path.name for path in (model.parent / "runs").iterdir()] == ["run"]


def test_a_padding_token_beyond_the_embedding_may_remain(model: Path):
    """As in many tunes of Llama 2, with a token for padding that no prompt holds."""
    hf = AutoTokenizer.from_pretrained(model)
    hf.add_tokens(["<a>", "<b>", "<c>"])
    hf.add_special_tokens({"pad_token": "<pad>"})
    hf.save_pretrained(model)
    assert check_model(run_of(model)).tokenizer.vocab_size == 261
    hf.add_tokens(["<d>"])
    hf.save_pretrained(model)
    with pytest.raises(UserError, match=r"it has 262 tokens, the embedding 260, which lacks '<d>'"):
        check_model(run_of(model))


def test_a_reference_of_another_shape_is_refused(model: Path, byte_tokenizer: Path):
    other = model.parent / "reference"
    write_model(other, byte_tokenizer, mlp=64)
    with pytest.raises(UserError, match=rf"learner\.reference_kl\.path = '{other}': not shaped"):
        check_model(run_of(model, f'learner.reference_kl={{path="{other}",coef=0.1}}'))


def test_a_reference_may_have_other_special_tokens(model: Path, byte_tokenizer: Path):
    """As the base of a tune with a token for padding of its own: no log-prob depends on them."""
    other = model.parent / "reference"
    write_model(other, byte_tokenizer, bos_id=1, eos_ids=(2,), pad_id=3)
    assert load_config(other) != load_config(model)
    assert check_model(run_of(model, f'learner.reference_kl={{path="{other}",coef=0.1}}'))


def test_a_cache_without_room_for_a_group_is_refused(model: Path):
    """The message names what suffices, and one byte less is refused; prompts that do not fit are left out."""
    prompt = len(check_model(run_of(model)).prompt)
    asked = ["learner.group_size=5", "rollout.sampling.max_tokens=30"]

    def checked(nbytes: int) -> int:
        return check_model(run_of(model, *asked, f"rollout.engine.kv_cache_bytes={nbytes}")).longest

    pages = prompt // 16 + 5 * (-(-(prompt + 30 - 1) // 16) - prompt // 16)
    enough = pages * 16 * 2 * 1 * 16 * 4
    said = rf"kv_cache_bytes = {enough - 1} has no room for 5 responses of 30 .* need {enough}$"
    with pytest.raises(UserError, match=said):
        checked(enough - 1)
    assert prompt <= checked(enough) < checked(1 << 30) == 64 - 30


@pytest.mark.parametrize("group", [2, 3, 20])
@pytest.mark.parametrize("tokens", [1, 6, 16, 40])
def test_every_prompt_that_is_taken_has_room_in_the_cache(group: int, tokens: int):
    """The next longer prompt has no room, though a still longer one, of whole pages, may have."""
    settings = [f"learner.group_size={group}", f"rollout.sampling.max_tokens={tokens}"]
    settings += ["model.max_positions=2048", "learner.microbatch_tokens=2048"]
    shape = shape_of((run := load(None, settings)).model, CharTokenizer())
    page = 16 * 2 * shape.layers * shape.kv_heads * shape.head_dim * 4
    for pages in range(pages_of_prompt(1, group, tokens), 90, 11):
        run = override(run, f"rollout.engine.kv_cache_bytes={pages * page}")
        longest = longest_prompt(run, shape)
        assert all(pages_of_prompt(p, group, tokens) <= pages for p in range(1, longest + 1))
        assert pages_of_prompt(longest + 1, group, tokens) > pages


def pages_of_prompt(prompt: int, group: int, tokens: int) -> int:
    """Counts the pages one by one: those that hold only prompt are there once. The last token that is drawn has
    no key."""
    first = [[at < prompt for at in range(page, page + 16)] for page in range(0, prompt, 16)]
    shared = sum(map(all, first))
    return shared + group * (len(range(0, prompt + tokens - 1, 16)) - shared)


def test_a_prompt_leaves_room_for_what_may_follow_it():
    def longest(*more: str) -> int:
        run = load(None, ["model.max_positions=256", "rollout.sampling.max_tokens=6", *more])
        return longest_prompt(run, shape_of(run.model, CharTokenizer()))

    assert longest() == 250
    assert longest("learner.microbatch_tokens=100") == 94
    assert longest("rollout.engine.type=vllm", "rollout.engine.max_positions=80") == 74


TOOLS = '''
class Environment:
    def find(self, name: str, letters: int | None = None, all: bool = False) -> str:
        """Finds a note."""

    async def count(self) -> int:
        """Counts the notes."""
'''


@pytest.mark.parametrize(
    ("template", "room", "refused"),
    [
        (TEMPLATE, 1024, ""),
        (TEMPLATE, 9, "max_given_tokens = 9: the description of its tools alone takes"),
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}", 1024, "leaves out `tools`"),
        (TEMPLATE.replace("m.tool_calls", "0"), 1024, "`tool_calls`"),
        (TEMPLATE.replace("tool_call>", "a_call>"), 1024, "task.chat.reply_format must name one"),
    ],
)
async def test_tools_that_no_model_is_shown_are_refused_early(
    tmp_path: Path, byte_tokenizer: Path, template: str, room: int, refused: str
):
    """The oracle is the worker, which refuses them when it has started an engine."""
    model = tmp_path / "model"
    write_model(model, byte_tokenizer, max_positions=4096)
    hf = AutoTokenizer.from_pretrained(model)
    hf.chat_template = template
    hf.save_pretrained(model)
    (model.parent / "notes.py").write_text(TOOLS)
    path = f"rollout.environment.path={model.parent}/notes.py"
    given = f"rollout.environment.max_given_tokens={room}"
    run = run_of(model, "rollout.environment.type=python", path, given)
    environment: Any = run.rollout.environment
    engine: Any = None  # nothing is drawn
    client = EngineClient(engine, load_tokenizer(model, chat_of(run.task)))
    turns = OwnTurns(run, client, environment)
    if not refused:
        await turns.start()
        await turns.close()
        (found,) = (one.says for one in findings(run, check_model(run)) if one.name == "tools")
        assert found == "count(), find(name: string, letters = null, all: boolean = false)"
        return
    with pytest.raises(UserError, match=refused) as late:
        await turns.start()
    with pytest.raises(UserError) as early:
        check_model(run)
    assert early.value.lines() == late.value.lines()
