// The curves. All plots share the x axis: its unit, its range, and the cursor.

const MARGIN = { left: 54, right: 10, top: 8, bottom: 22 };
const HEIGHT = 190;
const MOST_KEYS = 9; // of a plot: with more lines the runs are told apart by the one legend above all plots

// The classes of run i: eight colours, and beyond them other dashes.
function lineOf(i) {
  return `c${i % 8} d${Math.floor(i / 8) % 4}`;
}

class Curves {
  constructor(root, openTokens) {
    this.root = root;
    this.openTokens = openTokens;
    this.axis = "step";
    this.smooth = 0;
    this.range = null;
    this.cursor = null;
    this.hidden = new Set(); // runs that are switched off, and groups of seeds, as g0
    this.grouped = true; // runs that differ in their seed alone are drawn as their mean
    this.plots = [];
    this.bars = el("div", { class: "contents" });
    this.resize = new ResizeObserver((entries) => entries.forEach((e) => e.target.plot?.draw()));
  }

  // News of the same plots are drawn into those that stand, so that neither focus nor place is lost.
  build(data) {
    this.data = data;
    this.bars.replaceChildren(...histograms(data));
    const shape = JSON.stringify([data.meta.plots, data.meta.groups.map((group) => group.name), data.meta.runs.map((run) => [run.name, run.workers])]);
    if (shape === this.shape) {
      this.renew();
      return;
    }
    this.shape = shape;
    const open = this.root.querySelector("details.more-plots")?.open;
    this.resize.disconnect();
    this.plots = [];
    const sections = new Map();
    for (const plot of data.meta.plots) {
      if (!sections.has(plot.section)) sections.set(plot.section, []);
      sections.get(plot.section).push(plot);
    }
    const parts = [this.toolbar()];
    for (const [name, plots] of sections) {
      const drawn = plots.map((plot) => new Plot(plot, this));
      this.plots.push(...drawn);
      const grid = el("div", { class: "grid" }, drawn.map((p) => p.root));
      if (name === "Staleness") grid.append(this.bars);
      if (name === "Every other metric") {
        parts.push(el("details", { class: "more-plots", open }, el("summary", {}, `${name} (${plots.length})`), grid));
      } else parts.push(el("section", { "aria-label": name }, el("h2", {}, name), grid));
    }
    this.root.replaceChildren(...parts);
    for (const plot of this.plots) this.resize.observe(plot.root);
    this.say();
  }

  toolbar() {
    const pick = (label, options, value, change) =>
      el("label", {}, label, " ", el("select", { onchange: (e) => change(e.target.value) },
        options.map(([v, text]) => el("option", { value: v, selected: String(v) === String(value) }, text))));
    this.readout = el("output", { "aria-live": "polite" });
    this.open = el("button", { onclick: () => this.openTokens(Math.max(0, Math.round(this.cursor) - 1)) });
    this.reset = el("button", { onclick: () => this.zoom(null) }, "whole range");
    const runs = this.data.meta.runs;
    this.final = runs.length < 2 ? null : this.figures();
    const bar = el("div", { class: "toolbar" },
      pick("x axis", [["step", "steps"], ["elapsed_s", "minutes"]], this.axis, (v) => {
        this.axis = v; this.range = this.cursor = null; this.redraw(); this.say();
      }),
      pick("smoothing", [[0, "none"], [5, "5 steps"], [20, "20 steps"]], this.smooth, (v) => { this.smooth = +v; this.redraw(); }),
      this.data.meta.groups.length ? pick("seeds", [["mean", "mean ± spread"], ["each", "each run"]], this.grouped ? "mean" : "each", (v) => {
        this.grouped = v === "mean";
        const now = this.figures();
        this.final.replaceWith(now);
        this.final = now;
        this.redraw();
      }) : null,
      this.reset, this.open, this.readout,
      el("span", { class: "hint" }, "drag to zoom · Esc resets · focus a plot: ← → read values, Enter opens the tokens"));
    return el("div", {}, this.final, bar);
  }

  // The final figures of runs that go on; what has the focus stays.
  renew() {
    if (!this.final) return;
    const now = this.figures();
    const [old, fresh] = [this.final, now].map((box) => [...box.querySelectorAll("td")]);
    old.forEach((cell, i) => { cell.textContent = fresh[i].textContent; });
  }

  // The legend of all plots: a line for each run, with its final figures and a switch.
  figures() {
    const { runs, table: lines, groups } = this.data.meta;
    const chosen = lines.filter((line) => line.leading);
    const head = ["run", "", ...chosen.flatMap((line) => (line.key === "eval/accuracy" ? [line.label, "best"] : [line.label]))];
    const key = (name, look, text) => el("label", { class: `key ${look}` }, el("input", {
      type: "checkbox", checked: !this.hidden.has(name),
      onchange: (e) => { this.hidden[e.target.checked ? "delete" : "add"](name); this.redraw(); },
    }), el("span", { class: "swatch" }), text);
    const drawn = this.inMeans();
    const means = (this.grouped ? groups : []).map((group, g) => [
      key(`g${g}`, lineOf(group.runs[0]), group.name), "",
      ...chosen.flatMap((line) => {
        const both = group.finals[line.key];
        return [both ? `${show(both[0])} ± ${show(both[1], 2)}` : "", ...(line.key === "eval/accuracy" ? [""] : [])];
      }),
    ]);
    const rows = runs.map((run, i) => [
      drawn.has(i) ? `${i + 1} ${run.name}` : key(i, lineOf(i), `${i + 1} ${run.name}`),
      run.title,
      ...chosen.flatMap(({ key, values }) => [show(values[i].final), ...(key === "eval/accuracy" ? [values[i].best == null ? "" : `${show(values[i].best)} at ${show(values[i].step)}`] : [])]),
    ]);
    return el("div", { class: "figures", tabindex: 0, role: "region", "aria-label": "final figures of the runs" }, table(head, [...means, ...rows]));
  }

  // The runs that are drawn as the mean of their group.
  inMeans() {
    return new Set(this.grouped ? this.data.meta.groups.flatMap((group) => group.runs) : []);
  }

  redraw() {
    for (const plot of this.plots) plot.draw();
  }

  zoom(range) {
    this.range = range;
    this.redraw();
    this.say();
  }

  point(x) {
    this.cursor = x;
    if (this.queued) return;
    this.queued = true;
    requestAnimationFrame(() => {
      this.queued = false;
      for (const plot of this.plots) plot.mark();
      this.say();
    });
  }

  say() {
    this.reset.hidden = !this.range;
    const at = this.axis === "step" && this.cursor != null;
    this.open.hidden = !at;
    this.open.textContent = at ? `tokens of step ${Math.max(0, Math.round(this.cursor) - 1)}` : "";
    this.readout.textContent = this.cursor == null ? "" : this.axis === "step" ? `step ${show(this.cursor)}` : `minute ${show(this.cursor)}`;
  }

  // The lines of a plot: [{run, label, color, dash, x, y, band}], y as recorded times the plot's scale; band is the
  // spread around a mean of several seeds. Workers are always drawn apart.
  lines(plot) {
    const { meta, arrays } = this.data;
    const drawn = plot.source === "worker" ? new Set() : this.inMeans();
    const out = drawn.size ? this.means(plot) : [];
    meta.runs.forEach((run, i) => {
      if (drawn.has(i)) return;
      const places = plot.source === "worker"
        ? run.workers.map((name, n) => [`${i}/worker/${n}`, name])
        : [[`${i}/${plot.source}`, ""]];
      places.forEach(([place, worker], n) => plot.lines.forEach((line, k) => {
        const y = arrays.get(`${place}/${line.key}`);
        const x = arrays.get(`${place}/${this.axis}`);
        if (!y || !x) return;
        const several = meta.runs.length > 1;
        const nth = plot.source === "worker" ? n : k;
        out.push({
          run: i, worker, key: line.key, place,
          label: [several ? run.name : "", worker, line.label].filter(Boolean).join(" · "),
          look: several ? `${lineOf(i)} ${meta.runs.length > 8 ? `n${nth % 4}` : `d${nth % 4}`}` : `c${nth % 8}`,
          part: [worker, line.label].filter(Boolean).join(" · "),
          x: this.axis === "step" ? x : x.map((v) => v / 60), y: y.map((v) => v * plot.scale),
        });
      }));
    });
    return out;
  }

  means(plot) {
    const { meta, arrays } = this.data;
    const several = meta.groups.length > 1 || this.inMeans().size < meta.runs.length;
    return meta.groups.flatMap((group, g) => plot.lines.flatMap((line, k) => {
      const place = `g${g}/${plot.source}`;
      const y = arrays.get(`${place}/${line.key}`);
      const x = arrays.get(`${place}/${this.axis}`);
      if (!y || !x) return [];
      return [{
        run: `g${g}`, worker: "", key: line.key, place, part: line.label,
        label: [several ? group.name : "", line.label].filter(Boolean).join(" · "),
        look: several ? `${lineOf(group.runs[0])} d${k % 4}` : `c${k % 8}`,
        x: this.axis === "step" ? x : x.map((v) => v / 60), y: y.map((v) => v * plot.scale),
        band: arrays.get(`g${g}/spread/${plot.source}/${line.key}`)?.map((v) => v * plot.scale),
      }];
    }));
  }

  csv(plot) {
    const { meta, arrays } = this.data;
    const worker = plot.source === "worker";
    const rows = [["run", ...(worker ? ["worker"] : []), "step", "elapsed_s", ...plot.lines.map((l) => l.key)]];
    meta.runs.forEach((run, i) => {
      const places = worker ? run.workers.map((name, n) => [`${i}/worker/${n}`, [run.name, name]]) : [[`${i}/${plot.source}`, [run.name]]];
      for (const [place, head] of places) {
        const steps = arrays.get(`${place}/step`) || [];
        const columns = ["elapsed_s", ...plot.lines.map((l) => l.key)].map((key) => arrays.get(`${place}/${key}`));
        steps.forEach((step, n) => rows.push([...head, step, ...columns.map((c) => c?.[n])]));
      }
    });
    download(`${plot.id}.csv`, rows);
  }
}

class Plot {
  static count = 0;

  constructor(plot, curves) {
    this.plot = plot;
    this.curves = curves;
    this.clip = `clip-${Plot.count++}`;
    this.svg = svg("svg", { role: "img", tabindex: 0, "aria-label": `${plot.title}${plot.unit ? `, ${plot.unit}` : ""}` });
    this.legend = el("div", { class: "legend" });
    this.root = el("figure", { class: "plot", "data-plot": plot.id },
      el("figcaption", {}, el("b", {}, plot.title), " ", el("span", { class: "unit" }, plot.unit), this.about(),
        el("button", { class: "csv", title: `${plot.title} as CSV`, "aria-label": `${plot.title} as CSV`, onclick: () => curves.csv(plot) }, "CSV")),
      this.svg, this.legend);
    if (plot.about.length) this.root.append(this.told);
    this.root.plot = this;
    this.svg.addEventListener("pointermove", (e) => this.move(e));
    this.svg.addEventListener("pointerdown", (e) => { this.from = this.at(e); this.svg.setPointerCapture(e.pointerId); });
    this.svg.addEventListener("pointerup", (e) => this.release(e));
    this.svg.addEventListener("dblclick", () => curves.zoom(null));
    this.svg.addEventListener("keydown", (e) => this.press(e));
  }

  // A button that says in a sentence for each line what the plot shows.
  about() {
    const { title, about } = this.plot;
    if (!about.length) return null;
    this.told = el("ul", { class: "about", hidden: true }, about.map((text) => el("li", {}, text)));
    const open = (event) => {
      this.told.hidden = !this.told.hidden;
      event.currentTarget.setAttribute("aria-expanded", String(!this.told.hidden));
    };
    return el("button", { class: "ask", title: about.join("\n"), "aria-label": `what ${title} means`, "aria-expanded": "false", onclick: open }, "?");
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width) return;
    this.width = width;
    this.lines = this.curves.lines(this.plot).filter((line) => !this.curves.hidden.has(line.run));
    const all = this.lines.flatMap((l) => (l.x.length ? [l.x[0], l.x[l.x.length - 1]] : []));
    const [x0, x1] = this.curves.range || [Math.min(0, ...all), Math.max(1, ...all)];
    Object.assign(this, { x0, x1 });
    this.scaleY();
    const inner = svg("g", { "clip-path": `url(#${this.clip})` });
    for (const line of this.lines) {
      const smooth = this.curves.smooth && line.y.length > 10 ? averaged(line.y, this.curves.smooth) : null;
      const classes = `line ${line.look}`;
      if (line.band) inner.append(svg("path", { class: `band ${line.look}`, d: this.around(line, smooth || line.y) }));
      if (smooth) inner.append(svg("path", { class: `${classes} faint`, d: this.path(line.x, line.y) }));
      inner.append(svg("path", { class: classes, d: this.path(line.x, smooth || line.y) }));
      if (line.y.length < 40) line.y.forEach((y, i) => Number.isNaN(y) || inner.append(svg("circle", { class: `dot ${line.look}`, cx: this.px(line.x[i]), cy: this.py(y), r: 2 })));
    }
    this.cursorLine = svg("line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom });
    this.selection = svg("rect", { class: "selection", y: MARGIN.top, height: HEIGHT - MARGIN.top - MARGIN.bottom, width: 0 });
    const clip = svg("clipPath", { id: this.clip }, svg("rect", {
      x: MARGIN.left, y: 0, width: Math.max(1, width - MARGIN.left - MARGIN.right), height: HEIGHT - MARGIN.bottom + 1 }));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(clip, this.axes(), this.selection, inner, this.cursorLine);
    this.legend.replaceChildren(...this.keys());
    this.mark();
  }

  // A key with its value for each line; where that would be many, for each part of the plot with the range of
  // its values, since the runs have one legend for all plots.
  keys() {
    const shared = this.lines.length > MOST_KEYS && this.curves.data.meta.runs.length > 1;
    const groups = new Map();
    this.lines.forEach((line, i) => {
      const name = shared ? line.part : `${i}`;
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(line);
    });
    this.groups = [...groups.values()];
    this.values = this.groups.map(() => el("span", { class: "value" }));
    return this.groups.map(([line], i) => {
      const label = (shared ? line.part : line.label) || this.plot.title.toLowerCase();
      const swatch = shared ? [] : [el("span", { class: "swatch" })];
      return el("span", { class: `key ${shared ? "" : line.look}` }, swatch, el("span", { class: "label" }, label), this.values[i]);
    });
  }

  scaleY() {
    let low = Infinity, high = -Infinity;
    const log = this.plot.log && this.lines.every((l) => l.y.every((v) => Number.isNaN(v) || v > 0));
    for (const { x, y, band } of this.lines) {
      for (let i = 0; i < y.length; i++) {
        if (x[i] < this.x0 || x[i] > this.x1 || Number.isNaN(y[i])) continue;
        const around = band?.[i] || 0;
        low = Math.min(low, log && y[i] <= around ? y[i] : y[i] - around);
        high = Math.max(high, y[i] + around);
      }
    }
    if (low > high) [low, high] = [0, 1];
    if (this.plot.zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
    if (log) [low, high] = [Math.log10(low), Math.log10(high)];
    if (high === low) [low, high] = [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
    const pad = (high - low) * 0.06;
    this.log = log;
    this.y0 = this.plot.zero && low === 0 ? 0 : low - pad;
    this.y1 = high + pad;
  }

  px(x) {
    return MARGIN.left + ((x - this.x0) / (this.x1 - this.x0 || 1)) * (this.width - MARGIN.left - MARGIN.right);
  }

  py(y) {
    const v = this.log ? Math.log10(y) : y;
    return HEIGHT - MARGIN.bottom - ((v - this.y0) / (this.y1 - this.y0)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  }

  path(x, y) {
    let d = "", pen = "M";
    for (let i = 0; i < y.length; i++) {
      if (Number.isNaN(y[i])) { pen = "M"; continue; }
      d += `${pen}${this.px(x[i]).toFixed(1)} ${this.py(y[i]).toFixed(1)}`;
      pen = "L";
    }
    return d;
  }

  // The outline of a band, there along its upper side and back along its lower one. On a logarithmic axis a side
  // below 0 is at the bottom.
  around({ x, band }, y) {
    const there = [...x.keys()].filter((i) => !Number.isNaN(y[i]) && !Number.isNaN(band[i]));
    const at = (i, v) => `${this.px(x[i]).toFixed(1)} ${(this.log && v <= 0 ? HEIGHT - MARGIN.bottom : this.py(v)).toFixed(1)}`;
    const points = [...there.map((i) => at(i, y[i] + band[i])), ...there.reverse().map((i) => at(i, y[i] - band[i]))];
    return points.length ? `M${points.join("L")}Z` : "";
  }

  axes() {
    const g = svg("g", { class: "axes" });
    let values = ticks(this.y0, this.y1, 4);
    if (this.log) {
      const decades = ticks(Math.ceil(this.y0), Math.floor(this.y1), 4).filter(Number.isInteger).map((e) => 10 ** e);
      values = decades.length > 2 ? decades : logTicks(this.y0, this.y1);
    }
    for (const v of values) {
      const y = this.py(v);
      g.append(svg("line", { x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y }),
        svg("text", { x: MARGIN.left - 6, y: y + 3.5, "text-anchor": "end" }, show(v, 3)));
    }
    for (const v of ticks(this.x0, this.x1, Math.max(2, this.width / 90))) {
      g.append(svg("text", { x: this.px(v), y: HEIGHT - 6, "text-anchor": "middle" }, show(v, 3)));
    }
    return g;
  }

  // Moves the cursor, and says the values there.
  mark() {
    if (!this.lines || !this.cursorLine) return;
    const x = this.curves.cursor;
    const inside = x != null && x >= this.x0 && x <= this.x1;
    this.cursorLine.classList.toggle("on", inside);
    if (inside) for (const name of ["x1", "x2"]) this.cursorLine.setAttribute(name, this.px(x));
    this.groups.forEach((lines, i) => {
      const at = (line) => (x == null ? lastFinite(line.y) : nearest(line.x, x));
      const values = lines.map((line) => line.y[at(line)]).filter(Number.isFinite);
      const [low, high] = [Math.min(...values), Math.max(...values)];
      const spread = lines[0].band?.[at(lines[0])];
      const told = Number.isFinite(spread) ? `${show(low)} ± ${show(spread, 2)}` : show(low);
      this.values[i].textContent = !values.length ? "–" : lines.length > 1 ? `${show(low, 3)} … ${show(high, 3)}` : told;
    });
  }

  at(event) {
    const box = this.svg.getBoundingClientRect();
    const share = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
    return this.x0 + Math.max(0, Math.min(1, share)) * (this.x1 - this.x0);
  }

  move(event) {
    const x = this.at(event);
    if (this.from != null && event.buttons) {
      const [a, b] = [this.px(this.from), this.px(x)].sort((p, q) => p - q);
      this.selection.setAttribute("x", a);
      this.selection.setAttribute("width", b - a);
    }
    this.curves.point(this.snapped(x));
  }

  release(event) {
    const to = this.at(event), from = this.from;
    this.from = null;
    if (from == null || !this.selection) return;
    this.selection.setAttribute("width", 0);
    if (Math.abs(this.px(to) - this.px(from)) > 6) this.curves.zoom([Math.min(from, to), Math.max(from, to)]);
  }

  snapped(x) {
    const line = this.lines.reduce((a, b) => (a && a.x.length >= b.x.length ? a : b), null);
    return line && line.x.length ? line.x[nearest(line.x, x)] : x;
  }

  press(event) {
    const line = this.lines?.reduce((a, b) => (a && a.x.length >= b.x.length ? a : b), null);
    if (!line || !line.x.length) return;
    const now = this.curves.cursor == null ? line.x.length - 1 : nearest(line.x, this.curves.cursor);
    const far = event.shiftKey ? 10 : 1;
    const to = { ArrowLeft: now - far, ArrowRight: now + far, Home: 0, End: line.x.length - 1 }[event.key];
    if (to != null) this.curves.point(line.x[Math.max(0, Math.min(line.x.length - 1, to))]);
    else if (event.key === "Enter" && this.curves.axis === "step" && this.curves.cursor != null) this.curves.open.click();
    else if (event.key === "Escape") this.curves.zoom(null);
    else return;
    event.preventDefault();
  }
}

// 1, 2 and 5 of each decade between 10^low and 10^high; where these are too few, evenly spaced numbers.
function logTicks(low, high) {
  const out = [];
  for (let e = Math.floor(low); e <= high; e++) for (const m of [1, 2, 5]) out.push(m * 10 ** e);
  const inside = out.filter((v) => v >= 10 ** low && v <= 10 ** high);
  return inside.length > 2 ? inside : ticks(10 ** low, 10 ** high, 4).filter((v) => v > 0);
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  if (high < 0) return -1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}

function lastFinite(values) {
  let i = values.length - 1;
  while (i >= 0 && Number.isNaN(values[i])) i--;
  return i;
}

// Exponential average over about `steps` values, started without bias.
function averaged(values, steps) {
  const keep = 1 - 1 / steps;
  let sum = 0, weight = 0;
  return values.map((v) => {
    if (Number.isNaN(v)) return v;
    sum = sum * keep + v;
    weight = weight * keep + 1;
    return sum / weight;
  });
}
