"""The report in a real browser: a file and served, by mouse and by keyboard, with hostile text, with 100,000
trajectories. Skipped where no Chromium is found: `make browser` installs one, CHROMIUM names another."""

import csv
import json
import os
import re
import shutil
import threading
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from helpers.readers import unpack_arrays
from playwright.sync_api import Browser, Error, Page, expect, sync_playwright

from areal_q.messages import Array, VersionSpan
from areal_q.observability.metrics_log import MetricsLog
from buffer.logs.trajectory_log import TrajectoryLog
from buffer.logs.trajectory_schema import groups_to_table
from buffer.report.figures import write_figures_csv
from buffer.report.page import whole_file
from buffer.report.runs import read_runs
from buffer.report.serve import ReportServer

expect.set_options(timeout=30_000)  # a busy machine is slow, not wrong
EVIL = [
    "<script>window.pwned = 1</script>",
    "</script><img src=x onerror=window.pwned=1>",
    "<img src=x onerror=window.pwned=1>",
    "\u2028",
    "\u2029'\"`${1}",
    "&lt;b&gt;",
    "-->",
]


@pytest.fixture(scope="module")
def browser():
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as playwright:
        try:
            # A container's root may not have the sandbox; the pages are this test's own.
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except Error as error:
            pytest.skip(f"no Chromium, see `make browser`: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def new_page(browser: Browser):
    """new_page() is a page that must end without an error, without a request to anywhere else, and with no
    hostile script run."""
    context = browser.new_context(viewport={"width": 1400, "height": 900}, accept_downloads=True)
    said: list[str] = []
    asked: list[str] = []

    def make() -> Page:
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        return page

    yield make
    own = ("file:", "data:", "blob:", "http://127.0.0.1:")
    assert said == []
    assert [url for url in asked if not url.startswith(own)] == []
    for page in context.pages:
        assert page.evaluate("window.pwned") is None
    context.close()


@pytest.fixture
def show(new_page, tmp_path):
    """show(directories, hash) is the page of their report as a file."""

    def open_file(directories: list[Path], place: str = "", max_bytes: int = 10**7) -> Page:
        path = tmp_path / "report.html"
        path.write_text(whole_file(read_runs(directories), max_bytes), encoding="utf-8")
        page = new_page()
        page.goto(f"{path.as_uri()}{place}")
        page.wait_for_selector("body[data-ready]")
        return page

    return open_file


def rows_of(path: Path) -> list[list[str]]:
    """Head first, the rest sorted: a page lists one worker after the other."""
    head, *rows = csv.reader(path.read_text().splitlines())
    return [head, *sorted(rows, key=lambda row: row[: head.index("step") + 1])]


@pytest.mark.timeout(60)
def test_every_plot_is_drawn_and_its_csv_is_the_commands(show, write_run, tmp_path):
    directories = [write_run(tmp_path / "a", 6), write_run(tmp_path / "b", 4, "seed=1")]
    page = show(directories)
    runs = read_runs(directories)
    write_figures_csv([r.name for r in runs], [r.records for r in runs], tmp_path / "csv")
    plots = page.locator("#curves > section figure[data-plot]")
    assert plots.count() > 10
    for id in ("reward", "worker_rate", "weight_bytes"):
        with page.expect_download() as download:
            page.locator(f"figure[data-plot={id}] button.csv").click()
        ours = rows_of(download.value.path())
        theirs = rows_of(tmp_path / "csv" / f"{id}.csv")
        assert ours[0] == theirs[0] and len(ours) == len(theirs) > 6
        for one, other in zip(ours[1:], theirs[1:], strict=True):
            names = ours[0].index("step")
            assert one[:names] == other[:names]
            assert [float(x or "nan") for x in one[names:]] == pytest.approx(
                [float(x or "nan") for x in other[names:]], rel=0, abs=0, nan_ok=True
            )
    page.get_by_role("combobox", name="seeds").select_option("each")
    expect(page.locator("figure[data-plot=reward] path.line")).to_have_count(2)
    page.get_by_role("tab", name="Answers and settings").click()
    expect(page.get_by_text("Settings that differ")).to_be_visible()
    assert (
        page.locator("table", has_text="seed").first.inner_text().splitlines()[-1] == "seed\t0\t1"
    )


def test_a_fault_is_the_first_row_and_looks_like_one(show, write_run, tmp_path):
    directory = write_run(tmp_path / "flat")
    file = directory / "metrics.jsonl"
    records = map(json.loads, file.read_text().splitlines())
    flat = {"reward/mean": 0.0, "reward/std": 0.0}
    file.write_text("".join(json.dumps(record | flat) + "\n" for record in records))
    rows = show([directory]).locator("#summary > div")
    expect(rows.first).to_have_class("bad")
    expect(rows.first).to_contain_text("reward is flat")
    tops = [row.bounding_box()["y"] for row in rows.all()]
    assert len(tops) > 5 and min(tops[1:]) > tops[0]


def test_runs_of_several_seeds_are_drawn_as_mean_and_band(show, write_run, tmp_path):
    runs = [write_run(tmp_path / f"s{seed}", 5 + seed, f"seed={seed}") for seed in range(3)]
    page = show([*runs, write_run(tmp_path / "other", 6, "learner.max_lag=9")])
    plot = page.locator("figure[data-plot=reward]")
    expect(plot.locator("path.line")).to_have_count(2)
    expect(plot.locator("path.band")).to_have_count(1)
    outline = plot.locator("path.band").get_attribute("d") or ""
    assert re.fullmatch(
        r"M([\d.]+ [\d.]+L?){10}Z", outline
    )  # five steps that all have, there and back
    expect(plot.locator(".legend")).to_contain_text("mean of 3 runs, seeds 0, 1, 2")
    plot.locator("svg").focus()
    page.keyboard.press("Home")
    first = [read_runs([run])[0].steps[0]["reward/mean"] for run in runs]
    shown = plot.locator(".value").first.inner_text().split(" ± ")
    wanted = [np.mean(first), np.std(first, ddof=1)]
    assert [float(x) for x in shown] == pytest.approx(wanted, rel=0.06)
    expect(page.get_by_role("checkbox")).to_have_count(2)  # the group, and the other run
    page.get_by_role("checkbox", name="mean of 3 runs").uncheck()
    expect(plot.locator("path.line")).to_have_count(1)
    page.get_by_role("combobox", name="seeds").select_option("each")
    expect(plot.locator("path.line")).to_have_count(4)
    expect(plot.locator("path.band")).to_have_count(0)


def test_the_values_of_a_step_are_read_by_mouse_and_by_keyboard(show, write_run, tmp_path):
    page = show([write_run(tmp_path / "a", 6)])
    records = read_runs([tmp_path / "a"])[0].steps
    plot = page.locator("figure[data-plot=loss]")
    plot.locator("svg").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(page.locator("output").first).to_have_text("step 2")
    shown = float(plot.locator(".value").inner_text())
    assert shown == pytest.approx(records[1]["train/loss"], rel=1e-3)
    box = plot.locator("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 14, box["y"] + 60)
    expect(page.locator("output").first).to_have_text("step 6")
    # A drag zooms, all plots with it; Escape takes it back.
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60, steps=3)
    page.mouse.up()
    expect(page.get_by_role("button", name="whole range")).to_be_visible()
    plot.locator("svg").focus()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="whole range")).to_be_hidden()
    page.keyboard.press("Enter")
    expect(page.locator("#tokens h2").first).to_contain_text("Step ")


def test_a_click_path_from_a_step_to_a_token(show, write_run, tmp_path):
    directory = write_run(tmp_path / "a", 4)
    page = show([directory])
    page.get_by_role("tab", name="Tokens").click()
    expect(page.locator("#tokens h2").first).to_have_text("Step 0, group 0, ticket 0")
    page.get_by_role("button", name="next step").click()
    page.locator("#groups [role=option]").nth(2).click()
    expect(page.locator("#tokens h2").first).to_have_text("Step 1, group 2, ticket 5")
    page.locator("#trajectories [role=option]").nth(1).click()
    expect(page.locator("#tokens aside")).to_contain_text("Response #1")
    tokens = page.locator(".response .tok")
    expect(tokens).to_have_count(3)
    tokens.nth(2).click()
    run = read_runs([directory])[0]
    _, arrays = unpack_arrays(run.groups.chunk(1, 2, 1))
    place = 2 + 2  # behind the two tokens of the first response
    log_w = float(arrays["proximal_logprobs"][place] - arrays["behavior_logprobs"][place])
    facts = page.locator("#tokens aside dl").first.inner_text()
    assert f"{float(f'{np.exp(log_w):.4g}')} (log" in facts
    for shade in ("ratio", "advantage", "entropy", "version", "surprise", "mismatch"):
        page.get_by_label("colour of tokens").select_option(shade)
        expect(page.locator(".response .tok")).to_have_count(3)
    expect(page).to_have_url(re.compile("#tokens/0/1/2/1$"))


def test_the_viewer_is_walked_by_keyboard_alone(show, write_run, tmp_path):
    page = show([write_run(tmp_path / "a", 4)], "#tokens/0/2/0/0")
    title = page.locator("#tokens h2").first
    expect(title).to_have_text("Step 2, group 0, ticket 6")
    page.locator("#groups").focus()
    page.keyboard.press("j")
    expect(title).to_have_text("Step 2, group 1, ticket 7")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("k")
    expect(title).to_have_text("Step 2, group 1, ticket 7")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "trajectories"
    page.keyboard.press("ArrowDown")
    expect(page.locator("#tokens aside")).to_contain_text("Response #1")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("End")
    selected = page.locator(".response [aria-selected=true]")
    expect(selected).to_have_attribute("data-at", "2")
    page.keyboard.press("h")
    expect(selected).to_have_attribute("data-at", "1")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"
    page.keyboard.press("]")
    expect(title).to_contain_text("Step 3")


def test_axis_smoothing_and_run_switches_redraw_the_plots(show, write_run, tmp_path):
    page = show([write_run(tmp_path / "a", 30), write_run(tmp_path / "b", 30, "learner.max_lag=9")])
    line = page.locator("figure[data-plot=loss] path.line")
    expect(line).to_have_count(2)
    drawn = line.first.get_attribute("d")
    page.get_by_label("smoothing").select_option("5")
    expect(line).to_have_count(4)  # and the raw ones, faint
    assert line.first.get_attribute("d") == drawn != line.nth(1).get_attribute("d")
    page.get_by_label("smoothing").select_option("0")
    page.get_by_label("x axis").select_option("elapsed_s")
    assert line.first.get_attribute("d") != drawn
    page.get_by_role("checkbox", name="a").uncheck()
    expect(line).to_have_count(1)
    page.get_by_role("tab", name="Tokens").click()
    page.get_by_label("run", exact=True).select_option("1")
    page.get_by_role("button", name="next step").click()
    expect(page).to_have_url(re.compile("#tokens/1/1/0/0$"))


def test_many_runs_share_one_legend_with_their_final_figures(show, write_run, tmp_path):
    runs = [write_run(tmp_path / f"run{i}", 4, f"learner.max_lag={i}") for i in range(12)]
    page = show(runs)
    rows = page.locator("#curves .figures tbody tr")
    expect(rows).to_have_count(12)
    assert rows.nth(9).inner_text().split("\t")[0].strip() == "10 run9"
    assert "0.4" in rows.first.inner_text()
    for name in ("held-out accuracy", "reward", "gradient norm", "mismatch KL (k3)"):
        expect(page.locator("#curves .figures th", has_text=name)).to_have_count(1)
    line = page.locator("figure[data-plot=loss] path.line")
    expect(line).to_have_count(12)
    looks = line.evaluate_all(
        "all => all.map(e => getComputedStyle(e).stroke + getComputedStyle(e).strokeDasharray)"
    )
    assert len(set(looks)) == 12
    # One for each of its two metrics, and none for each of the runs.
    assert page.locator("figure[data-plot=mismatch_kl] .legend .key").count() == 2
    page.get_by_role("checkbox", name="10 run9").uncheck()
    expect(line).to_have_count(11)
    assert page.evaluate("document.documentElement.scrollWidth") == 1400


def test_axes_have_three_ticks_and_plots_an_explanation(show, write_run, tmp_path):
    page = show([write_run(tmp_path / "a", 6)])
    ticks = page.locator("#curves > section figure svg[tabindex]").evaluate_all(
        "all => all.map(e => e.querySelectorAll('.axes text[text-anchor=end]').length)"
    )
    assert len(ticks) > 10 and min(ticks) >= 3
    plot = page.locator("figure[data-plot=ess]")
    expect(plot.locator(".about")).to_be_hidden()
    plot.get_by_role("button", name="what Effective sample size of w means").click()
    expect(plot.locator(".about")).to_contain_text("share of the tokens")


def test_a_long_response_is_shown_page_by_page(show, write_run, make_group, make_ticket, tmp_path):
    directory = write_run(tmp_path / "long", 1)
    tokens = 4500
    group = make_group(make_ticket(9, step=0))
    long = msgspec.structs.replace(
        group.trajectories[0],
        response_ids=Array.of(np.arange(tokens) % 10 + 2, "int32"),
        behavior_logprobs=Array.of(-np.ones(tokens), "float32"),
        loss_mask=Array.of(np.ones(tokens), "uint8"),
        spans=[VersionSpan(0, 3000, "a0"), VersionSpan(1, 1500, "b1")],
    )
    group = msgspec.structs.replace(group, trajectories=[long, group.trajectories[1]])
    log = TrajectoryLog(directory / "trajectories", resume_at=1)
    log.append(1, 1, [group])
    log.close()
    page = show([directory], "#tokens/0/1/0/0")
    shown = page.locator(".response .tok")
    expect(shown).to_have_count(2000)
    page.get_by_role("button", name="tokens after").click()
    expect(shown.first).to_have_attribute("data-at", "2000")
    expect(page.locator(".response .swap")).to_have_attribute("data-at", "3000")
    page.locator(".response").focus()
    page.keyboard.press("End")
    expect(shown).to_have_count(500)
    expect(page.locator(".response [aria-selected=true]")).to_have_attribute("data-at", "4499")
    expect(page.locator("#tokens aside")).to_contain_text("0 × 3000 (a0), 1 × 1500 (b1)")
    expect(page.locator(".notice")).to_contain_text("no token log")


@pytest.fixture
def hostile(write_run, make_group, make_ticket, tmp_path):
    """A run whose every text is hostile: of tokens, prompt, answer, samples, worker, reward parts."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {text: i for i, text in enumerate([*EVIL, "0", "<e>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="0"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>")
    fast.save_pretrained(tmp_path / "model")
    model = ('model.type="pretrained"', f'model.path="{tmp_path / "model"}"')
    text = "".join(EVIL)
    directory = write_run(tmp_path / "hostile", 1, *model)
    with MetricsLog(directory, tensorboard=False) as metrics:
        sample = {"prompt": text, "answer": text, "response": text, "correct": False}
        metrics.write(
            "eval", 2, {"eval/accuracy": 0.1}, samples=[sample | {"prompt": "1+1="}, sample]
        )
        metrics.write("eval", 3, {"eval/accuracy": 0.1}, samples=[sample])
        metrics.write(
            "step", 2, {f"reward/part_{text}": 1.0}, workers=[{"worker": text, "version": 1}]
        )
    group = make_group(make_ticket(9, step=0, prompt=text, answer=text))
    ids = Array.of(np.arange(len(EVIL)), "int32")
    ones = np.ones(len(EVIL))
    trajectories = [
        msgspec.structs.replace(
            t,
            response_ids=ids,
            behavior_logprobs=Array.of(-ones, "float32"),
            loss_mask=Array.of(ones, "uint8"),
            spans=[msgspec.structs.replace(t.spans[0], tokens=len(EVIL))],
            reward_parts={text: 1.0},
            reward_notes={text: text},
        )
        for t in group.trajectories
    ]
    group = msgspec.structs.replace(group, trajectories=trajectories, worker=text)
    log = TrajectoryLog(directory / "trajectories", resume_at=1)
    log.append(1, 1, [group])
    log.close()
    return directory


def test_text_of_a_model_stays_text(show, hostile):
    page = show([hostile], "#tokens/0/1/0/0")
    tokens = page.locator(".response .tok")
    expect(tokens).to_have_count(len(EVIL))
    assert tokens.evaluate_all("all => all.map(t => t.textContent)") == EVIL
    assert page.locator("#tokens aside").inner_text().count("window.pwned") >= 3
    page.get_by_role("tab", name="Answers and settings").click()
    assert page.locator("#answers").inner_text().count("window.pwned") >= 3
    page.get_by_role("tab", name="Curves").click()
    assert page.locator("img, script[src], iframe, b:not(figcaption b)").count() == 0


def write_large(
    directory: Path, steps: int, groups: int, size: int, make_group, make_ticket
) -> None:
    """A log of steps · groups · size trajectories: one step's rows again and again."""
    made = [make_group(make_ticket(i, group_size=size)) for i in range(groups)]
    table = groups_to_table(0, 0, made)
    log = TrajectoryLog(directory / "trajectories")
    for step in range(steps):
        numbers = pa.array(table["number"].to_numpy() + step * groups)
        column = pa.array(np.full(len(table), step))
        again = table.set_column(0, table.schema.field("step"), column)
        place = table.schema.get_field_index("number")
        again = again.set_column(place, table.schema.field("number"), numbers)
        log.append_rows(lambda rows=again: rows)
    log.close()


@pytest.mark.timeout(60)
def test_100_000_trajectories_open_in_budget_and_are_paged(
    show, write_run, make_group, make_ticket, tmp_path
):
    directory = write_run(tmp_path / "large", 1)
    shutil.rmtree(directory / "trajectories")
    write_large(directory, 100, 125, 8, make_group, make_ticket)
    page = show([directory], "#tokens/0/50/0/0", max_bytes=3_000_000)
    assert (tmp_path / "report.html").stat().st_size <= 3_000_000
    expect(page.locator("#status")).to_contain_text("100,000 trajectories")
    expect(page.locator("#tokens h2").first).to_have_text("Step 50, group 0, ticket 6250")
    # Listed, whether held or not; what is not held says so.
    held = page.evaluate("document.querySelectorAll('script[data-name^=groups]').length")
    assert 10 < held < 100 * 16
    page.get_by_label("step", exact=True).fill("37")
    page.keyboard.press("Enter")
    page.locator("#groups").focus()
    page.keyboard.press("End")
    expect(page.locator("#tokens h2").first).to_have_text("Step 37, group 124, ticket 4749")
    # No more rows in the document than can be looked at.
    assert page.locator("#groups [role=option]").count() <= 300


@pytest.mark.timeout(60)
def test_served_every_trajectory_is_there_and_a_live_run_grows(
    new_page, write_run, make_group, make_ticket, tmp_path
):
    directory = write_run(tmp_path / "large", 1)
    shutil.rmtree(directory / "trajectories")
    write_large(directory, 100, 125, 8, make_group, make_ticket)
    server = ReportServer(read_runs([directory]))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        page = new_page()
        page.goto(f"{server.url}#tokens/0/37/124/5")
        expect(page.locator("#tokens h2").first).to_have_text(
            "Step 37, group 124, ticket 4749", timeout=30_000
        )
        expect(page.locator("#tokens aside")).to_contain_text("Response #5")
        expect(page.locator(".response .tok")).to_have_count(7)
        log = TrajectoryLog(directory / "trajectories", resume_at=100)
        log.append(100, 100, [make_group(make_ticket(99_999, step=100))])
        log.close()
        expect(page.locator("#status")).to_contain_text("100,002 trajectories")
        page.get_by_label("step", exact=True).fill("100")
        page.keyboard.press("Enter")
        expect(page.locator("#tokens h2").first).to_have_text("Step 100, group 0, ticket 99999")
        page.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.timeout(60)
def test_the_final_figures_of_served_runs_follow_them(new_page, write_run, tmp_path):
    directories = [write_run(tmp_path / "a", 4), write_run(tmp_path / "b", 4)]
    server = ReportServer(read_runs(directories))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        page = new_page()
        page.goto(server.url)
        figures = page.locator("#curves .figures tbody tr").nth(1)
        expect(figures).to_contain_text("0.4")
        with MetricsLog(directories[1], tensorboard=False) as metrics:
            metrics.write("eval", 5, {"eval/accuracy": 0.765})
        expect(figures).to_contain_text("0.765")
        page.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(browser, write_run, tmp_path, scheme):
    """Contrast of at least 4.5 (WCAG 2.2, 1.4.3), also of tokens in their strongest colours."""
    directory = write_run(tmp_path / "a", 3)
    (tmp_path / "r.html").write_text(whole_file(read_runs([directory]), 10**6), encoding="utf-8")
    page = browser.new_page(color_scheme=scheme)
    page.goto(f"{(tmp_path / 'r.html').as_uri()}#tokens/0/1/0/1")
    page.wait_for_selector("body[data-ready]")
    assert page.locator(".tok").count() > 3
    worst = page.evaluate(CONTRAST)
    assert worst[0] >= 4.5, worst
    page.close()


CONTRAST = """() => {
  const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = color;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((v, i) => v * a / 255 + under[i] * (1 - a / 255));
  const fill = (e) => rgba(getComputedStyle(e).backgroundColor);
  const behind = (e) => e ? over(fill(e), behind(e.parentElement)) : [255, 255, 255];
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let worst = [99, ""];
  for (const e of document.querySelectorAll("body *")) {
    const text = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!text || !e.checkVisibility() || ["SCRIPT", "STYLE", "OPTION"].includes(e.tagName)) continue;
    if (e.closest(".unused, .absent, [disabled]")) continue;
    const under = behind(e);
    const [a, b] = [light(over(rgba(getComputedStyle(e).color), under)), light(under)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, `${e.className} ${e.textContent.slice(0, 40)}`];
  }
  return worst;
}"""
