// What is no curve: figures of a run, comparison, settings, answers, histograms.

const FEW_RUNS = 4; // that fit beside each other

function table(head, rows, attributes = {}) {
  return el("table", attributes,
    el("thead", {}, el("tr", {}, head.map((h) => el("th", { scope: "col" }, h)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value, i) =>
      value instanceof Node && value.tagName === "TD" ? value : el(i ? "td" : "th", i ? {} : { scope: "row" }, value))))));
}

function buildAnswers(root, { meta }) {
  const several = meta.runs.length > 1;
  const parts = [];
  const csv = (name, rows) => el("button", { class: "csv", onclick: () => download(name, rows()) }, "CSV");
  parts.push(el("h2", {}, several ? "Comparison" : "Figures", " ", csv("comparison.csv", () => comparisonRows(meta))));
  parts.push(el("div", { class: "wide" }, meta.runs.length > FEW_RUNS ? figuresByRun(meta) : figuresByMetric(meta)));
  parts.push(el("p", { class: "hint" }, "Final: mean of the last tenth of the steps; of held-out accuracy the last evaluation."));
  if (several) {
    parts.push(el("h2", {}, "Settings that differ"));
    const names = meta.runs.map((run, i) => (meta.runs.length > FEW_RUNS ? `${i + 1}` : run.name));
    parts.push(meta.settings.length
      ? el("div", { class: "wide" }, table(["setting", ...names], meta.settings.map((row) => [row.key, ...row.values.map(setting)])))
      : el("p", {}, "none"));
  }
  for (const run of meta.runs) {
    const answers = answersOf(run, several);
    if (meta.runs.length <= FEW_RUNS) parts.push(...answers);
    else if (answers.length) parts.push(el("details", {}, el("summary", {}, `Answers of ${run.name}`), answers));
  }
  for (const run of meta.runs) {
    parts.push(el("details", {}, el("summary", {}, `All settings${several ? ` of ${run.name}` : ""}`),
      table(["setting", "value"], Object.entries(run.settings).map(([key, value]) => [key, setting(value)]))));
  }
  root.replaceChildren(...parts);
}

function best({ best, step }) {
  return best == null ? "" : `${show(best)} at ${show(step)}`;
}

function figuresByMetric(meta) {
  const several = meta.runs.length > 1;
  return table(["", ...meta.runs.flatMap((run) => (several ? [`${run.name}: final`, "best"] : ["final", "best"]))],
    meta.table.map((line) => [line.label, ...line.values.flatMap((v) => [
      el("td", { class: "number" }, show(v.final)),
      el("td", { class: "number" }, best(v)),
    ])]));
}

// Many runs stand one below the other.
function figuresByRun(meta) {
  return table(["run", ...meta.table.flatMap((line) => [line.label, ...(line.values.some((v) => v.best != null) ? ["best"] : [])])],
    meta.runs.map((run, i) => [`${i + 1} ${run.name}`, ...meta.table.flatMap((line) => [
      el("td", { class: "number" }, show(line.values[i].final)),
      ...(line.values.some((v) => v.best != null) ? [el("td", { class: "number" }, best(line.values[i]))] : []),
    ])]));
}

function comparisonRows(meta) {
  const head = ["metric", ...meta.runs.flatMap((run) => [`${run.name} final`, `${run.name} best`, `${run.name} best at step`])];
  return [head, ...meta.table.map((line) => [line.key, ...line.values.flatMap((v) => [v.final, v.best, v.step])])];
}

function setting(value) {
  return typeof value === "object" && value != null ? JSON.stringify(value) : value == null ? "–" : String(value);
}

function answersOf(run, several) {
  const of = several ? ` of ${run.name}` : "";
  const parts = [];
  if (run.evaluations.length) {
    parts.push(el("h2", {}, `Evaluations${of}`));
    parts.push(table(["task", "format", "estimates, with 95 % intervals"], run.evaluations.map((e) => [e.task, e.format, e.says])));
  }
  if (run.answers.length) {
    parts.push(el("h2", {}, `Held-out answers${of}: before and after`));
    parts.push(table(["prompt", "expected", "before", "after"], run.answers.map((a) =>
      [code(a.prompt), code(a.expected), verdict(a.before, a.correct_before), verdict(a.after, a.correct_after)])));
  }
  if (run.samples.length > 2) parts.push(sampleBrowser(run, of));
  return parts;
}

function sampleBrowser(run, of) {
  const body = el("div");
  const pick = el("input", { type: "range", min: 0, max: run.samples.length - 1, value: run.samples.length - 1, "aria-label": "evaluation", oninput: draw });
  const label = el("output");
  function draw() {
    const { step, samples } = run.samples[pick.value];
    label.textContent = `step ${step}`;
    body.replaceChildren(table(["prompt", "expected", "response"], samples.map((s) => [code(s.prompt), code(s.answer), verdict(s.response, s.correct)])));
  }
  draw();
  return el("section", {}, el("h2", {}, `Held-out samples${of}`), el("div", { class: "toolbar" }, pick, label), body);
}

function code(text) {
  return el("code", {}, text);
}

function verdict(text, correct) {
  if (correct === null) return el("td", { title: "its reward failed" }, "? ", code(text));
  return el("td", { class: correct ? "right" : "wrong" }, correct ? "✓ " : "✗ ", code(text));
}

// Histograms over the whole log, the runs side by side in each bin.
function histograms({ meta, arrays }) {
  const made = [
    ["lags", "Tokens by version lag, whole log", "share of tokens", "version lag"],
    ["ages", "Groups by staleness, whole log", "share of groups; versions from admission to use", "versions from admission to use"],
  ];
  return made.map(([key, title, unit, label]) => {
    const counts = meta.runs.map((_, i) => arrays.get(`${i}/${key}`) || []);
    const bins = Math.max(0, ...counts.map((c) => c.length));
    if (!bins) return null;
    const rows = () => [["run", key === "lags" ? "lag" : "versions", "count"], ...meta.runs.flatMap((run, i) => [...counts[i]].map((n, bin) => [run.name, bin, n]))];
    return el("figure", { class: "plot", "data-plot": key },
      el("figcaption", {}, el("b", {}, title), " ", el("span", { class: "unit" }, unit),
        el("button", { class: "csv", "aria-label": `${title} as CSV`, onclick: () => download(`${key}.csv`, rows()) }, "CSV")),
      bars(counts, bins, label, meta.runs));
  }).filter(Boolean);
}

function bars(counts, bins, label, runs) {
  const width = 360, base = HEIGHT - MARGIN.bottom;
  const shares = counts.map((c) => { const sum = c.reduce((a, b) => a + b, 0) || 1; return [...c].map((n) => n / sum); });
  const top = Math.max(...shares.flat(), 1e-9);
  const slot = (width - MARGIN.left - MARGIN.right) / bins;
  const g = svg("svg", { role: "img", "aria-label": label, viewBox: `0 0 ${width} ${HEIGHT}` });
  for (const t of ticks(0, top, 4)) {
    const y = base - (t / top) * (base - MARGIN.top - 12);
    g.append(svg("g", { class: "axes" }, svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }),
      svg("text", { x: MARGIN.left - 6, y: y + 3.5, "text-anchor": "end" }, `${show(t * 100, 3)}%`)));
  }
  const every = Math.ceil(bins / 12);
  for (let bin = 0; bin < bins; bin++) {
    shares.forEach((share, i) => {
      const h = ((share[bin] || 0) / top) * (base - MARGIN.top - 12);
      const w = (slot * 0.7) / shares.length;
      g.append(svg("rect", { class: `bar c${i % 8}`, x: MARGIN.left + slot * (bin + 0.15) + w * i, y: base - h, width: w, height: h },
        svg("title", {}, `${runs[i].name}, ${label} ${bin}: ${show(counts[i][bin] || 0)} (${show((share[bin] || 0) * 100, 3)} %)`)));
    });
    if (bin % every === 0) g.append(svg("text", { class: "tick", x: MARGIN.left + slot * (bin + 0.5), y: HEIGHT - 6, "text-anchor": "middle" }, String(bin)));
  }
  return g;
}
