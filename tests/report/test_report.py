"""The report's data: chunks, CSV, the list of trajectories, tokens with their text, the file, the server."""

import csv
import html.parser
import http.client
import math
import re
import shutil
import threading
from functools import partial

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers.commands import areal_q, refused, run_here
from helpers.readers import iter_tokens, unpack_arrays
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from areal_q.config import Arithmetic, PretrainedModel, SmallModel, load
from areal_q.errors import ConfigError, LogError, RecordError
from areal_q.messages import Array, Branch, TurnReward, VersionSpan
from areal_q.observability.metrics_log import read_metrics
from buffer.logs.token_log import TokenLog
from buffer.logs.trajectory_log import TrajectoryLog, iter_log
from buffer.logs.trajectory_schema import groups_to_table
from buffer.report import cli as command
from buffer.report import page
from buffer.report.cli import elsewhere
from buffer.report.figures import DELTA, plots_for, rows_of, write_figures_csv
from buffer.report.index import Index, to_chunk
from buffer.report.listed import matching
from buffer.report.packed_arrays import pack_arrays
from buffer.report.page import bisection, interesting, shell, whole_file
from buffer.report.runs import Reported, different_settings, overview, read_runs, thinned
from buffer.report.serve import ReportServer
from buffer.report.text import Pieces

DTYPES = st.sampled_from(["uint8", "int32", "float32", "float64"])


@pytest.fixture
def run_dir(write_run, tmp_path):
    return write_run(tmp_path / "demo")


# Chunks and the page


@given(
    st.dictionaries(st.text(), st.tuples(DTYPES, st.binary(max_size=64)), max_size=5),
    st.recursive(
        st.none() | st.text() | st.integers(-(2**53), 2**53),
        lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=3),
        max_leaves=8,
    ),
)
def test_a_chunk_comes_back_as_it_was(named, meta):
    arrays = {
        name: np.frombuffer(data[: len(data) // 8 * 8], dtype)
        for name, (dtype, data) in named.items()
    }
    got_meta, got = unpack_arrays(pack_arrays(meta, arrays))
    assert got_meta == meta and list(got) == list(arrays)
    for name, array in arrays.items():
        assert got[name].dtype == array.dtype and got[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("bad", [np.zeros(2, np.int64), np.zeros((2, 2), np.int32)])
def test_an_array_that_the_page_cannot_read_is_refused(bad):
    with pytest.raises(ValueError, match="x: "):
        pack_arrays({}, {"x": bad})


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)


@given(st.text())
@example("</script><script>alert(1)</script>")
@example("<!--<script>")
@example("{{chunks}}{{script}}\u2028\u2029")
@example('" onerror="alert(1)')
def test_no_text_becomes_markup_of_the_page(text):
    def tags(title, name, meta):
        parser = Tags()
        parser.feed(shell(title, [(name, pack_arrays(meta, {}))]))
        return parser.tags

    assert tags(text, text, {text: text}) == tags("x", "x", "x")


def test_the_page_runs_its_own_script_and_names_no_other_place(run_dir):
    text = whole_file(read_runs([run_dir]), 10**6)
    policy = re.search(r'Security-Policy" content="([^"]*)"', text)
    assert policy
    allowed = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    assert allowed["default-src"] == allowed["connect-src"] == "'none'"
    scripts = re.findall(r"<script>(.*?)</script>", text, re.S)
    assert len(scripts) == 1
    assert allowed["script-src"] == f"'sha256-{page._sha256(scripts[0])}'"
    assert "unsafe" not in policy[1]
    outside = set(re.findall(r"https?://[^\s\"'`]+", text))
    assert outside == {"http://www.w3.org/2000/svg"}
    markup = r"\.innerHTML|\.outerHTML|insertAdjacent|document\.write|eval\("
    assert not re.search(markup, scripts[0])


# Numbers


def test_csv_holds_every_metric_as_it_was_recorded(write_run, tmp_path):
    runs = read_runs([write_run(tmp_path / "a", 5), write_run(tmp_path / "b", 3)])
    count = write_figures_csv([r.name for r in runs], [r.records for r in runs], tmp_path / "csv")
    assert count == len(list((tmp_path / "csv").iterdir()))
    found = {}
    for path in (tmp_path / "csv").iterdir():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                place = (row.pop("run"), row.pop("worker", None), int(row.pop("step")))
                row.pop("elapsed_s")
                found |= {(*place, key): value for key, value in row.items()}
    expected = 0
    for name in "ab":
        for record in read_metrics(tmp_path / name / "metrics.jsonl"):
            metrics = {(None, k): v for k, v in record.items() if "/" in k}
            for w in record.get("workers", []):
                metrics |= {
                    (w["worker"], k): w[k] for k in ("tokens_per_s", "idle_share", "swap_s")
                }
            for (worker, key), value in metrics.items():
                text = found.get((name, worker, record["step"], key))
                if value is None:
                    assert text in ("", None), key
                elif key != "weights/delta_bytes":
                    assert text is not None and float(text) == value, key
                    expected += 1
    assert expected > 100
    assert found["a", None, 4, DELTA] == "1000.0"


def test_a_counter_that_starts_over_never_gives_negative_growth():
    totals = [5.0, 9.0, 2.0, 2.0]
    records = [
        {"kind": "step", "step": i, "weights/delta_bytes": total} for i, total in enumerate(totals)
    ]
    assert [r[DELTA] for r in rows_of(records, "step")] == [5, 4, 2, 0]


def test_every_metric_of_a_step_has_its_plot(run_dir):
    run = read_runs([run_dir])[0]
    plots = plots_for([run.records])
    keys = {line.key for plot in plots if plot.source == "step" for line in plot.lines}
    recorded = {k for r in run.steps for k, v in r.items() if "/" in k and v is not None}
    assert recorded - keys <= {"weights/delta_bytes"}
    assert [p.id for p in plots if p.section == "Every other metric"] == [
        "other.thing",
        "weights.delta_bytes",
    ]
    assert len({p.id for p in plots}) == len(plots)


def test_the_page_s_columns_are_the_metrics(run_dir):
    run = read_runs([run_dir])[0]
    _, arrays = unpack_arrays(pack_arrays(*_builtins(overview([run]))))
    assert arrays["0/step/mismatch/kl"].tolist() == [r["mismatch/kl"] for r in run.steps]
    assert arrays["0/eval/step"].tolist() == [0, 4]
    assert arrays["0/worker/1/tokens_per_s"].tolist() == [
        r["workers"][1]["tokens_per_s"] for r in run.steps
    ]
    assert "0/step/lag/max" not in arrays


def _builtins(chunk):
    meta, arrays = chunk
    return msgspec.to_builtins(meta), arrays


def test_many_runs_have_a_short_title_and_come_by_number(write_run, tmp_path):
    for i in (1, 2, 10, 11):
        write_run(tmp_path / f"run{i}", 2)
    runs = read_runs(sorted(tmp_path.glob("run*")))
    assert [run.name for run in runs] == ["run1", "run2", "run10", "run11"]
    assert "<title>4 runs · AReaL-Q</title>" in whole_file(runs, 10**6)
    chosen = [tmp_path / "run2", tmp_path / "run10", tmp_path / "run1"]
    assert [run.name for run in read_runs(chosen)] == ["run2", "run10", "run1"]


def test_every_plot_of_ours_says_what_it_shows(run_dir):
    plots = plots_for([read_runs([run_dir])[0].records])
    silent = {p.id for p in plots if not p.about}
    assert silent == {"other.thing"}
    kl = next(p for p in plots if p.id == "mismatch_kl")
    assert "KL estimate k1" in kl.about[0]


def test_only_settings_that_differ_are_compared():
    runs = [load(None, ["seed=1"]), load(None, ["seed=2", "learner.objective.type=tis", "name=x"])]
    rows = {row["key"]: row["values"] for row in different_settings(runs)}
    assert rows["seed"] == [1, 2]
    assert rows["learner.objective.type"] == ["acr", "tis"]
    assert rows["learner.objective.level"] == [None, "token"]
    assert "name" not in rows and "steps" not in rows


def test_the_final_accuracy_is_that_of_the_last_evaluation(write_run, tmp_path):
    run = read_runs([write_run(tmp_path / "a")])[0]
    evals = [
        {"kind": "eval", "step": i, "elapsed_s": 1.0, "eval/accuracy": i / 40} for i in range(40)
    ]
    run.records = [r for r in run.records if r["kind"] == "step"] + evals
    meta, _ = overview([run])
    (line,) = [line for line in meta["table"] if line["key"] == "eval/accuracy"]
    assert line["values"][0] == {"final": 39 / 40, "best": 39 / 40, "step": 39}
    evals[-1]["eval/late_by"] = 9.0
    meta, _ = overview([run])
    (line,) = [line for line in meta["table"] if line["key"] == "eval/accuracy"]
    assert line["values"][0] == {"final": 39 / 40, "best": 38 / 40, "step": 38}


def test_a_fault_of_the_run_is_its_first_row(run_dir):
    run = read_runs([run_dir])[0]
    healthy = run.summary.rows
    flat = {"reward/mean": 0.0, "reward/std": 0.0}
    run.records = [r | flat if r["kind"] == "step" else r for r in run.records]
    del run.summary
    first, *others = overview([run])[0]["runs"][0]["rows"]
    assert first == (
        "reward is flat",
        "✗ all rewards were 0 for 4 steps: nothing to learn from",
    )
    assert [name for name, _ in others] == [name for name, _ in healthy]
    assert not any(value.startswith("✗") for _, value in healthy)


def test_final_and_best_values_are_those_of_the_records(run_dir):
    run = read_runs([run_dir])[0]
    meta, _ = overview([run])
    lines = {line["key"]: line["values"][0] for line in meta["table"]}
    ess = [r["mismatch/ess"] for r in run.steps]
    best = {"best": max(ess), "step": ess.index(max(ess)) + 1}
    assert lines["mismatch/ess"] == {"final": ess[-1], **best}
    assert lines["mismatch/kl_k3"]["best"] is None
    assert lines["eval/accuracy"] == {"final": 0.4, "best": 0.4, "step": 4}


# Trajectories and tokens


def test_the_list_holds_what_the_logs_say(run_dir):
    index = Index(run_dir)
    index.refresh()
    scored = {
        (row["number"], row["index"]): row
        for _, table in iter_tokens(run_dir / "tokens")
        for row in table.to_pylist()
    }
    for step, groups in iter_log(run_dir / "trajectories"):
        one = index.steps[step]
        assert one.number.tolist() == [g.ticket.number for g in groups]
        assert one.prompts == [g.ticket.prompt for g in groups]
        assert one.size.tolist() == [len(g.trajectories) for g in groups]
        everyone = [(g, t) for g in groups for t in g.trajectories]
        assert one.columns["reward"].tolist() == [t.reward for _, t in everyone]
        assert one.columns["length"].tolist() == [t.num_tokens for _, t in everyone]
        assert one.columns["lag"].tolist() == [step - t.spans[0].version for _, t in everyone]
        for name, column in (("gap", "largest_gap"), ("marked", "marked")):
            assert one.columns[name].tolist() == [
                scored[g.ticket.number, t.index][column] for g, t in everyone
            ]
        assert one.lags.sum() == sum(t.num_tokens for _, t in everyone)
        assert one.ages.tolist() == ([3] if step == 0 else [0, 3])


def test_the_list_says_which_responses_were_not_scored(tmp_path, make_ticket, make_group):
    group = make_group(make_ticket(0))
    failed = replace(
        group.trajectories[1], valid=False, failure="timeout", reward=0.0, reward_parts={}
    )
    log = TrajectoryLog(tmp_path / "trajectories")
    log.append(0, 0, [replace(group, trajectories=[group.trajectories[0], failed])])
    log.close()

    index = Index(tmp_path)
    index.refresh()
    meta, arrays = to_chunk(list(index.steps.values()))

    causes = [meta["causes"][code] for code in arrays["trajectory/failed"]]
    assert causes == ["", "timeout"]


def test_a_response_comes_with_the_words_of_its_reward(tmp_path, write_run, make_group):
    group = make_group()
    judged = [replace(t, reward_notes={"judge": f"so {t.index}"}) for t in group.trajectories]
    table = groups_to_table(1, 1, [replace(group, trajectories=judged)])
    run = write_run(tmp_path / "run", 1)
    pq.write_table(table, run / "trajectories/part-000001.parquet")
    meta, _ = unpack_arrays(read_runs([run])[0].groups.chunk(1))
    found = [t["notes"] for t in meta["groups"][0]["trajectories"]]
    assert found == [[["judge", f"so {i}"]] for i in range(2)]


def test_branches_come_behind_the_first_path(tmp_path, write_run, make_group):
    group = make_group()
    first, second = group.trajectories
    branch = Branch(
        parent=0,
        at=1,
        response_ids=Array.of([7, 8], "int32"),
        behavior_logprobs=Array.of([0.0, -1.5], "float32"),
        loss_mask=Array.of([0, 1], "uint8"),
        spans=[VersionSpan(2, 2, "c2")],
        finish_reason="stop",
        turn_rewards=(TurnReward(1, -0.5),),
    )
    grown = replace(first, branches=(branch,), turn_rewards=(TurnReward(0, 2.0),))
    table = groups_to_table(1, 1, [replace(group, trajectories=[grown, second])])
    run = write_run(tmp_path / "run", 1)
    pq.write_table(table, run / "trajectories/part-000001.parquet")
    meta, arrays = unpack_arrays(read_runs([run])[0].groups.chunk(1))
    told = meta["groups"][0]["trajectories"]
    assert [t["length"] for t in told] == [first.num_tokens + 2, second.num_tokens]
    ids = [*first.response_ids.numpy(), 7, 8, *second.response_ids.numpy()]
    assert arrays["id"].tolist() == ids
    assert arrays["mask"].tolist() == [1, 1, 0, 1, 1, 1, 1]
    where = "from token 2 on, after 1 tokens of path 0, the prompt's included"
    turns = ["rewards of turns", "2 at token 0, -0.5 at token 3"]
    assert [t["notes"] for t in told] == [[["branch 1", where], turns], []]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), unique=True),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), unique=True),
)
def test_scores_are_matched_by_ticket_and_index(ours, theirs):
    numbers, indices, *scored = (
        np.array([pair[k] for pair in pairs], np.int64) for pairs in (ours, theirs) for k in (0, 1)
    )
    expected = [theirs.index(pair) if pair in theirs else -1 for pair in ours]
    assert matching(numbers, indices, *scored).tolist() == expected


def test_scores_that_are_logged_later_join_the_list(run_dir, tmp_path):
    index = Index(run_dir)
    shutil.move(run_dir / "tokens", tmp_path / "later")
    index.refresh()
    assert np.isnan(index.steps[0].columns["gap"]).all()
    shutil.move(tmp_path / "later", run_dir / "tokens")
    index.refresh()
    assert np.isfinite(index.steps[0].columns["gap"]).all()


def test_a_part_is_opened_twice_if_its_steps_are_listed(write_run, tmp_path, monkeypatch):
    directory, opened = write_run(tmp_path / "long", 40), []

    class Counted(pq.ParquetFile):
        def __init__(self, path, *args, **more):
            opened.append(path)
            super().__init__(path, *args, **more)

    monkeypatch.setattr(pq, "ParquetFile", Counted)
    index = Index(directory)
    index.refresh()
    assert len(index.steps) == 40
    parts = [*directory.glob("trajectories/*.parquet"), *directory.glob("tokens/*.parquet")]
    assert len(opened) == len(parts)
    to_chunk(list(index.steps.values()))
    to_chunk(list(index.steps.values()))
    assert len(opened) == 2 * len(parts)


def test_a_group_s_chunk_holds_every_token_as_it_was_logged(run_dir):
    run = read_runs([run_dir])[0]
    (_, groups), (_, table) = (
        list(iter_log(run_dir / "trajectories"))[2],
        list(iter_tokens(run_dir / "tokens"))[2],
    )
    scored = {(row["number"], row["index"]): row for row in table.to_pylist()}
    meta, arrays = unpack_arrays(run.groups.chunk(2, 1, 2))
    start = 0
    for told, group in zip(meta["groups"], groups[1:], strict=True):
        assert (told["prompt"], told["number"]) == (group.ticket.prompt, group.ticket.number)
        assert told["seed"] == str(group.ticket.seed)
        for one, t in zip(told["trajectories"], group.trajectories, strict=True):
            mine = slice(start, start + one["length"])
            start += one["length"]
            assert arrays["id"][mine].tolist() == t.response_ids.numpy().tolist()
            assert (
                arrays["behavior_logprobs"][mine].tolist() == t.behavior_logprobs.numpy().tolist()
            )
            for name in ("proximal_logprobs", "logprobs", "entropy", "advantages", "lag", "marks"):
                assert arrays[name][mine].tolist() == scored[group.ticket.number, t.index][name]
    assert start == len(arrays["id"])


def test_scores_stay_beside_a_response_that_was_not_learnt_from(run_dir):
    _, whole = unpack_arrays(read_runs([run_dir])[0].groups.chunk(0, 0, 3))
    tables = [table for _, table in iter_tokens(run_dir / "tokens")]
    left_out = tables[0].slice(0, 1).to_pylist()[0]
    shutil.rmtree(run_dir / "tokens")
    log = TokenLog(run_dir / "tokens")
    for table in tables:
        log.append_rows(partial(table.slice, 1))
    log.close()

    meta, arrays = unpack_arrays(read_runs([run_dir])[0].groups.chunk(0, 0, 3))

    start = 0
    for group in meta["groups"]:
        for one in group["trajectories"]:
            mine = slice(start, start + one["length"])
            start += one["length"]
            if (group["number"], one["index"]) == (left_out["number"], left_out["index"]):
                assert np.isnan(arrays["logprobs"][mine]).all() and not arrays["marks"][mine].any()
            else:
                assert arrays["logprobs"][mine].tolist() == whole["logprobs"][mine].tolist()
                assert arrays["marks"][mine].tolist() == whole["marks"][mine].tolist()


def test_a_run_without_a_token_log_shows_what_it_has(write_run, tmp_path):
    run = read_runs([write_run(tmp_path / "old", tokens=False)])[0]
    _, arrays = unpack_arrays(run.groups.chunk(0))
    assert set(arrays) == {"id", "piece", "behavior_logprobs", "mask"}
    assert np.isnan(run.index.steps[0].columns["gap"]).all()


def test_what_is_not_there_is_refused(run_dir, tmp_path):
    run = read_runs([run_dir])[0]
    for place in ((99, 0, 1), (0, 3, 1), (0, 0, 0)):
        with pytest.raises(KeyError):
            run.groups.chunk(*place)
    with pytest.raises(LogError, match="gone"):
        Reported(tmp_path / "gone")
    (run_dir / "tokens" / "part-000000.parquet").write_bytes(b"no Parquet")
    with pytest.raises(RecordError, match="part-000000"):
        run.refresh()


def test_the_list_grows_and_forgets_what_a_resume_took_back(run_dir, make_group):
    index = Index(run_dir)
    index.refresh()
    state, kept = index.state, index.steps[1]
    log = TrajectoryLog(run_dir / "trajectories", resume_at=4)
    log.append(4, 4, [make_group()])
    log.close()
    index.refresh()
    assert sorted(index.steps) == [0, 1, 2, 3, 4] and index.state != state
    assert index.steps[1] is kept
    TrajectoryLog(run_dir / "trajectories", resume_at=2).close()
    index.refresh()
    assert sorted(index.steps) == [0, 1]


def test_the_texts_of_tokens_read_as_the_response_does():
    pieces = Pieces(SmallModel(), Arithmetic())
    assert pieces([3, 12, 4, 1, 0, 500]) == ["1", "+", "2", "‹end›", "‹0›", "‹500›"]


def test_a_character_of_several_tokens_stands_with_the_first(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, "<e>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>")
    fast.save_pretrained(tmp_path)
    pieces = Pieces(PretrainedModel(path=str(tmp_path)), Arithmetic())
    text = "a é\n漢!"
    texts = pieces([*fast(text)["input_ids"], len(alphabet)])
    assert texts == ["a", " ", "é", "", "\n", "漢", "", "", "!", "<e>"]


def test_without_its_tokenizer_a_run_is_shown_by_ids():
    pieces = Pieces(PretrainedModel(path="/gone"), Arithmetic())
    assert pieces([7, 8]) == ["‹7›", "‹8›"] and "/gone" in pieces.note


# What a file holds


@given(st.integers(0, 200))
def test_bisection_visits_each_place_once_and_the_middle_early(length):
    order = list(bisection(length))
    assert sorted(order) == list(range(length))
    if length > 2:
        assert order[1] == length // 2


def test_the_telling_steps_come_first(run_dir):
    run = read_runs([run_dir])[0]
    for record in run.records:
        if record["kind"] == "step":
            record["mismatch/kl_k3"] = 9.0 if record["step"] == 3 else 0.0
    order = interesting(run, [0, 1, 2, 3])
    assert order[:3] == [0, 3, 2] and sorted(order) == [0, 1, 2, 3]


def test_a_small_budget_leaves_out_groups_and_not_curves(write_run, tmp_path):
    runs = read_runs([write_run(tmp_path / "demo", 40)])
    whole = whole_file(runs, 10**7)
    small = whole_file(runs, len(whole) - 20_000)
    assert len(small) <= len(whole) - 20_000
    names = re.findall(r'data-name="([^"]+)"', small)
    assert {"overview", "index/0"} < set(names)
    steps = {int(name.split("/")[2]) for name in names if name.startswith("groups/")}
    assert {0, 39} <= steps and len(steps) < 40


def test_the_report_of_a_read_only_run_asks_for_a_place(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(command.os, "access", lambda path, mode: path != run_dir)
    with pytest.raises(ConfigError, match="cannot be written to; name a file elsewhere: --out"):
        command.main([run_dir])
    command.main([run_dir], out=tmp_path / "r.html")
    assert (tmp_path / "r.html").is_file() and not (run_dir / "report.html").exists()


@pytest.mark.timeout(60)
def test_the_command_writes_file_and_csv_and_names_gaps(run_dir, tmp_path):
    asked = ["--out", "r.html", "--csv", "csv", "--max-mb", "1"]
    areal_q(tmp_path, "report", str(run_dir), *asked)
    assert 50_000 < (tmp_path / "r.html").stat().st_size < 10**6
    assert (tmp_path / "csv" / "reward.csv").is_file()
    for args in ([tmp_path / "none"], ["--out", tmp_path / "none" / "r.html"]):
        refused(run_here("report", command.main, str(run_dir), *map(str, args)), "none")


def test_several_runs_are_told_in_one_line_each(write_run, tmp_path, monkeypatch):
    for name in "ab":
        write_run(tmp_path / name, 4)
    monkeypatch.chdir(tmp_path)
    result = run_here("report", command.main, "a", "b", "--out", "r.html")
    assert result.returncode == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("a: done after 4 steps") and "held-out accuracy 0.400" in lines[0]


# The server


@pytest.fixture
def ask(run_dir):
    """ask(path, method="GET", **headers) is (status, headers, body) of the served report."""
    server = ReportServer(read_runs([run_dir]))
    port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()

    def call(path, method="GET", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=named)
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response.status, response.headers, body

    yield call
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_server_gives_the_page_and_every_group(ask, run_dir):
    status, headers, body = ask("/")
    assert status == 200 and b'data-source="served"' in body
    assert headers["X-Content-Type-Options"] == "nosniff"
    meta, _ = unpack_arrays(ask("/data/overview")[2])
    assert meta["runs"][0]["name"] == "demo"
    _, arrays = unpack_arrays(ask("/data/index/0")[2])
    assert len(arrays["trajectory/reward"]) == 24
    chunk = ask("/data/groups/0/3/2/1")[2]
    assert chunk == read_runs([run_dir])[0].groups.chunk(3, 2, 1)


def test_what_has_not_changed_is_not_sent_again(ask, run_dir):
    tags = {path: ask(path)[1]["ETag"] for path in ("/data/overview", "/data/index/0")}
    for path, tag in tags.items():
        assert ask(path, If_None_Match=tag)[::2] == (304, b"")
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind":"step","step":5,"elapsed_s":9.0,"time_s":9.0,"reward/mean":0.5}\n')
    status, _, body = ask("/data/overview", If_None_Match=tags["/data/overview"])
    assert status == 200
    assert unpack_arrays(body)[1]["0/step/reward/mean"][-1] == 0.5


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("/", "GET", {"Host": "evil.example"}, 403),
        ("/data/overview", "GET", {"Host": "evil.example:80"}, 403),
        ("/", "GET", {"Host": ""}, 403),
        ("/", "GET", {"Host": "localhost:1"}, 200),
        ("/", "GET", {"Host": "[::1]:8000"}, 200),
        ("/", "POST", {}, 405),
        ("/", "DELETE", {}, 405),
        ("/", "OPTIONS", {}, 405),
        ("/config.toml", "GET", {}, 404),
        ("/data/../../config.toml", "GET", {}, 404),
        ("/data/index/1", "GET", {}, 404),
        ("/data/index/-1", "GET", {}, 404),
        ("/data/groups/0/3/2/x", "GET", {}, 404),
        ("/data/groups/0/3/99/1", "GET", {}, 404),
        ("/data/groups/0/9/0/1", "GET", {}, 404),
        ("/data/index/١", "GET", {}, 404),
    ],
)  # fmt: skip
def test_the_server_answers_local_gets_of_known_paths_only(ask, path, method, headers, status):
    path = path.encode().decode("latin-1").replace("\xd9\xa1", "%D9%A1")
    assert ask(path, method, **headers)[0] == status


def test_a_host_without_a_display_is_told_how_to_tunnel(monkeypatch):
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    assert elsewhere(8123) == ""
    monkeypatch.delenv("DISPLAY")
    assert "ssh -L 8123:127.0.0.1:8123 " in elsewhere(8123)


def test_the_server_listens_on_loopback_only(run_dir):
    server = ReportServer(read_runs([run_dir]))
    assert server.server_address[0] == "127.0.0.1" and server.server_address[1] > 0
    server.server_close()


def test_a_lag_histogram_counts_every_token(run_dir):
    run = read_runs([run_dir])[0]
    _, arrays = overview([run])
    logged = [g for _, groups in iter_log(run_dir / "trajectories") for g in groups]
    tokens = sum(t.num_tokens for g in logged for t in g.trajectories)
    assert math.isclose(arrays["0/lags"].sum(), tokens)


def test_thinning_keeps_means_maxima_and_the_last_step():
    steps = [
        {"step": i + 1, "elapsed_s": float(i), "reward/mean": float(i % 2), "lag/max": float(i % 7)}
        for i in range(4000)
    ]
    thin = thinned(steps, 400)
    assert len(thin) == 400 and thin[-1]["step"] == steps[-1]["step"]
    assert {r["reward/mean"] for r in thin} == {0.5}
    assert {r["lag/max"] for r in thin} == {6.0}
    for step in steps[::2]:
        step |= {"fidelity/kl": 3.0, "fidelity/max": -float(step["step"])}
    thin = thinned(steps, 400)
    assert {r["fidelity/kl"] for r in thin} == {3.0}
    assert [r["fidelity/max"] for r in thin[:2]] == [-1.0, -11.0]
