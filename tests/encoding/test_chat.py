"""task.chat: the day in a template, a system message, a template of one's own, conversations as prompts."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from helpers.chain_models import CHATML, byte_tokenizer, write_chain

from areal_q.checks.model import longest_prompt
from areal_q.config import Chat, Jsonl, Run, load
from areal_q.errors import ConfigError, SettingsError, TaskError
from areal_q.models import load_config
from areal_q.system import run_dir
from areal_q.tasks import all_problems, load_tokenizer

FORMAT = "%A %d %B %Y, %-d.%m., day %j of %G-W%V-%u, %H:%M:%S, %-I:%M %p, %C%y, %h %e"
DATED = f"{{{{ strftime_now('{FORMAT}') }}}}" + CHATML


def directory(path: Path, template: str = CHATML) -> Path:
    byte_tokenizer(template=template).save_pretrained(path)
    return path


def prompt(path: Path, chat: Chat, text: str = "hi") -> str:
    tokenizer = load_tokenizer(path, chat)
    return tokenizer.decode(tokenizer.encode_prompt(text))


def test_a_template_s_day_is_that_of_the_settings(tmp_path: Path) -> None:
    said = prompt(directory(tmp_path, DATED), Chat(date="2024-02-29"))
    assert said.partition("<|im_start|>")[0] == datetime(2024, 2, 29).strftime(FORMAT)
    load_tokenizer(tmp_path, Chat()).save(str(tmp_path / "again"))
    assert (tmp_path / "again" / "chat_template.jinja").read_text() == DATED


def chatting(root: Path, **chat: str) -> Run:
    settings = [f"task.chat.{name}={json.dumps(value)}" for name, value in chat.items()]
    table = f'task={{type="jsonl",path="{root / "rows.jsonl"}",template="chat"}}'
    model = f'model={{type="pretrained",path="{root}"}}'
    return load(None, [f'root="{root}"', model, table, *settings])


def test_a_run_keeps_the_day_on_which_it_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = chatting(tmp_path)
    for day, resume in (("2026-03-01", False), ("2026-03-02", True), ("2026-03-03", False)):
        monkeypatch.setattr(run_dir, "date", type("", (), {"today": staticmethod(lambda d=day: d)}))
        with run_dir.claimed(run, resume) as (found, _):
            kept = load(found / "config.toml").task
            assert isinstance(kept, Jsonl)
            assert kept.chat.date == ("2026-03-01" if resume else day)
        if not resume:
            (found / "checkpoints" / "step-000001").mkdir(parents=True)
        assert run_dir.resumes(run), "settings that name no day do not differ in it"
    with pytest.raises(ConfigError, match=r"task\.chat\.date: cannot change"):
        run_dir.resumes(chatting(tmp_path, date="2026-01-01"))


def test_a_system_message_stands_before_prompts_without_one(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(directory(tmp_path), Chat(system="be brief"))
    user, own = {"role": "user", "content": "hi"}, {"role": "system", "content": "be long"}
    both = [{"role": "system", "content": "be brief"}, user]
    assert tokenizer.encode_prompt("hi") == tokenizer.encode_messages(both)
    assert tokenizer.encode_prompt([own, user]) == tokenizer.encode_messages([own, user])


def test_a_template_of_one_s_own_is_used_and_exported(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    path = directory(tmp_path / "m")
    assert prompt(path, Chat(template_file=str(file))) == "[hi]"
    (tmp_path / "out").mkdir()
    load_tokenizer(path, Chat(template_file=str(file))).save(str(tmp_path / "out"))
    assert prompt(tmp_path / "out", Chat()) == "[hi]"
    with pytest.raises(
        ConfigError, match=r"task\.chat\.template_file: .*none\.jinja: No such file"
    ):
        prompt(path, Chat(template_file=str(tmp_path / "none.jinja")))


def test_chat_settings_without_their_template_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"task\.chat has no effect without task\.template"):
        load(None, ["task.chat.system=x"])


def test_rows_may_be_conversations(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2="}]
    rows = [{"prompt": "1+1=", "answer": 2}, {"prompt": talk, "answer": 4}]
    data.write_text("".join(json.dumps(r) + "\n" for r in [*rows, {"messages": talk, "answer": 4}]))
    text, listed, named = all_problems(Jsonl(path=str(data), template="chat"))
    assert (text.asked, listed.asked, named) == ("1+1=", tuple(talk), listed)
    assert listed.prompt == "be brief\n\n2+2="
    tokenizer = load_tokenizer(directory(tmp_path / "m"), Chat())
    assert tokenizer.encode_prompt(listed.asked) == tokenizer.encode_messages(talk)
    with pytest.raises(TaskError, match=r"rows\.jsonl:2: a list of messages needs task\.template"):
        all_problems(Jsonl(path=str(data)))


def test_messages_stand_for_the_default_field_alone(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "2+2="}], "answer": 4}))
    assert all_problems(Jsonl(path=str(data), template="chat"))[0].asked
    with pytest.raises(TaskError, match="no field `mesages`; the row has messages, answer"):
        all_problems(Jsonl(path=str(data), prompt="mesages", template="chat"))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user"}], "is no message"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "give it as `answer`",
        ),
        ([{"role": "user", "content": " "}], "is empty"),
    ],
)
def test_a_conversation_that_asks_nothing_is_refused(
    tmp_path: Path, messages: list[dict[str, str]], reason: str
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"messages": messages, "answer": "2"}) + "\n")
    with pytest.raises(TaskError, match=rf"rows\.jsonl:1: .*{reason}"):
        all_problems(Jsonl(path=str(data), template="chat"))


def test_a_model_without_room_for_a_response_is_named(tmp_path: Path) -> None:
    shape = load_config(write_chain(tmp_path / "m", "42<|im_end|>"))
    run = load(None, ["rollout.sampling.max_tokens=600", "model.max_positions=2048"])
    with pytest.raises(
        ConfigError, match=r"max_tokens = 600 and a prompt .* the model's 512 positions"
    ):
        longest_prompt(run, shape)


CALLING = (
    "{% for m in messages %}[{{ m.content }}]"
    "{% for c in m.tool_calls or [] %}ARGS{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("{{ c.function.name }}{{ c.function.arguments | tojson }}", 'f{"n": "é"}'),
        ("{{ c.function.name + c.function.arguments }}", 'f{"n": "é"}'),
        (
            "{% for k, v in c.function.arguments.items() %}{{ c.function.name }}:{{ k }}={{ v }}{% endfor %}",
            "f:n=é",
        ),
        ("{{ c.function.name }}", None),
        ("{% if m.content %}{{ c.function.name }}{{ c.function.arguments }}{% endif %}", None),
    ],
)
def test_arguments_are_what_the_template_reads(
    tmp_path: Path, written: str, read: str | None
) -> None:
    """Some join them to a text, some write them as JSON, some go through them; some leave them out."""
    tokenizer = load_tokenizer(directory(tmp_path, CALLING.replace("ARGS", written)), Chat())
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"n": "é"}}}
    talk = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    if read:
        assert tokenizer.decode(tokenizer.encode_messages(talk)) == f"[?][]{read}"
    else:
        with pytest.raises(TaskError, match="leaves out `tool_calls`"):
            tokenizer.encode_messages(talk)


def test_bare_text_has_no_tools(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(directory(tmp_path), None)
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(TaskError, match="no chat template here to take tools"):
        tokenizer.encode_messages([{"role": "user", "content": "?"}], tools=[tool])
    with pytest.raises(TaskError, match="no chat template here to take tool_calls"):
        tokenizer.encode_messages([{"role": "assistant", "content": "", "tool_calls": [tool]}])
