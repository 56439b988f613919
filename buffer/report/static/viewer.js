// The token viewer: a step, a group, a trajectory; its tokens, coloured by what the learner made of them.

const PAGE_TOKENS = 2000;
const OTHERS = 32; // responses of the group that are drawn below the chosen one, and tokens of each
const OTHERS_TOKENS = 300;

class Viewer {
  constructor(root, source) {
    this.root = root;
    this.source = source;
    this.listings = new Map();
    this.run = 0;
    this.order = "used";
    this.shade = "mismatch";
    this.page = 0;
    this.token = 0;
  }

  build(meta) {
    this.meta = meta;
    if (this.root.firstChild) return;
    const choose = (options, value, change, label) => el("select", { "aria-label": label, onchange: (e) => change(e.target.value) },
      options.map(([v, text]) => el("option", { value: v, selected: v === value }, text)));
    this.stepInput = el("input", { type: "number", min: 0, "aria-label": "step", onchange: () => this.goStep(+this.stepInput.value) });
    this.slider = el("input", { type: "range", min: 0, "aria-label": "step, along the log", oninput: () => this.goStep(this.listing.steps[+this.slider.value]) });
    this.groups = new Listbox("groups", (g) => this.groupRow(g), (g) => this.goGroup(g), {
      ArrowRight: () => this.trajectories.root.focus(), l: () => this.trajectories.root.focus(), Enter: () => this.trajectories.root.focus() });
    this.groups.root.id = "groups";
    this.trajectories = new Listbox("responses of the group", (t) => this.trajectoryRow(t), (_, at) => this.goTrajectory(at), {
      ArrowLeft: () => this.groups.root.focus(), h: () => this.groups.root.focus(),
      ArrowRight: () => this.text.focus(), l: () => this.text.focus(), Enter: () => this.text.focus() });
    this.trajectories.root.id = "trajectories";
    this.shadePick = choose(Object.entries(SHADES).map(([k, s]) => [k, s.says]), this.shade, (v) => { this.shade = v; this.paint(); }, "colour of tokens");
    this.legend = el("div", { class: "scale" });
    this.prompt = el("pre", { class: "prompt" });
    this.text = el("div", { class: "response", role: "listbox", tabindex: 0, "aria-label": "tokens of the response", "aria-orientation": "horizontal" });
    this.text.addEventListener("keydown", (e) => this.press(e));
    this.text.addEventListener("click", (e) => { const t = e.target.closest(".tok"); if (t) this.goToken(+t.dataset.at); });
    this.pages = el("div", { class: "toolbar" });
    this.others = el("div", { class: "others" });
    this.facts = el("div", { class: "facts", "aria-live": "polite" });
    this.about = el("div", { class: "facts" });
    this.notice = el("p", { class: "notice", role: "status" });
    this.where = el("h2");
    this.root.replaceChildren(
      el("nav", { class: "side", "aria-label": "steps, groups, responses" },
        meta.runs.length > 1 ? choose(meta.runs.map((r, i) => [String(i), r.name]), "0", (v) => this.goRun(+v), "run") : null,
        el("div", { class: "steps" }, el("label", {}, "step ", this.stepInput),
          el("button", { "aria-label": "previous step", onclick: () => this.stepBy(-1) }, "‹"),
          el("button", { "aria-label": "next step", onclick: () => this.stepBy(1) }, "›"), this.slider),
        choose(Object.entries(ORDERS).map(([k, o]) => [k, o.says]), this.order, (v) => { this.order = v; this.list(); this.groups.choose(0); }, "order of groups"),
        this.groups.root, this.trajectories.root),
      el("div", { class: "reading" }, this.where, this.notice,
        el("div", { class: "toolbar" }, el("label", {}, "colour ", this.shadePick), this.legend, this.marksLegend()),
        this.prompt, this.text, this.pages, this.others),
      el("aside", { "aria-label": "details" }, this.facts, this.about,
        el("p", { class: "hint" }, "← → or h l: between lists, and from token to token · ↑ ↓ or j k: in a list; from response to response · n p: next, previous marked token · [ ]: steps")));
    this.root.addEventListener("keydown", (e) => {
      if (e.target.tagName === "INPUT" || e.target.tagName === "SELECT") return;
      if (e.key === "[" || e.key === "]") this.stepBy(e.key === "]" ? 1 : -1);
    });
  }

  marksLegend() {
    const row = (classes, says) => el("span", { class: `tok ${classes}` }, says);
    return el("span", { class: "marks" }, row("up", "clipped up"), row("down", "clipped down"), row("dual", "dual"),
      row("truncated", "truncated"), row("dropped", "masked"), row("unused", "not counted"));
  }

  // The list of a run, looked at again where the log may have grown.
  async load(run) {
    const chunk = await this.source.index(run);
    if (chunk) this.listings.set(run, new Listing(chunk));
    return this.listings.get(run);
  }

  async refresh() {
    const before = this.listing;
    this.listing = await this.load(this.run);
    if (this.listing === before) return;
    if (before && this.group) {
      const key = (l, g) => `${l.step[g]}/${l.place[g]}`;
      const was = key(before, this.group.at);
      const at = this.listing.size.findIndex((_, g) => key(this.listing, g) === was);
      if (at >= 0) this.group.at = at;
    }
    this.list();
  }

  async open(run, step, nth, index) {
    if (run !== this.run || !this.listing) {
      const listing = await this.load(run);
      [this.run, this.listing] = [run, listing]; // together: a click that comes meanwhile finds the one or the other
    }
    const { steps } = this.listing;
    if (!steps.length) return this.say(this.source.live ? "No step can be read yet; this page looks again by itself." : "The log of this run holds no trajectory.");
    let to = steps.includes(step) ? step : steps.findLast((s) => s <= step && this.source.has(run, s));
    to ??= steps.find((s) => this.source.has(run, s)) ?? steps[0];
    await this.goStep(to, nth, index);
  }

  async goRun(run) {
    this.group = null;
    this.opening = this.open(run, 0);
    await this.opening;
  }

  async goStep(step, nth = 0, index = 0) {
    if (!this.listing.bounds.has(step)) step = this.listing.steps.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a));
    this.step = step;
    const g = this.listing.bounds.get(step)[0] + nth;
    if (ORDERS[this.order].wide) this.order = this.root.querySelector("[aria-label='order of groups']").value = "used";
    this.list(g);
    await this.goGroup(this.groups.items[this.groups.at], index);
  }

  async stepBy(by) {
    await this.opening; // a click right after a choice of run counts from that run's first step
    const { steps } = this.listing;
    return this.goStep(steps[Math.max(0, Math.min(steps.length - 1, steps.indexOf(this.step) + by))]);
  }

  list(g = this.group?.at) {
    const { steps } = this.listing;
    this.slider.max = steps.length - 1;
    this.slider.value = steps.indexOf(this.step);
    this.stepInput.value = this.step;
    const groups = this.listing.ordered(this.order, this.step);
    this.groups.set(groups, Math.max(0, groups.indexOf(g)));
  }

  groupRow(g) {
    const l = this.listing;
    const unscored = l.unscored(g);
    const marked = l.largest(g, "marked");
    return el("div", { class: this.source.has(this.run, l.step[g]) ? "" : "absent" },
      el("span", { class: "clip" }, oneLine(l.prompts[g])),
      el("span", { class: "small" }, ORDERS[this.order].wide ? `step ${l.step[g]} · ` : "", `r ${show(l.reward(g), 3)} · gap ${show(l.largest(g, "gap"), 2)}`, unscored ? ` · ${unscored} of ${l.size[g]} not scored` : "", marked ? ` · ${show(marked)} marked` : ""));
  }

  trajectoryRow(t) {
    const l = this.listing;
    const marked = l.of.marked[t];
    return el("div", {}, el("span", { class: "clip" }, this.preview(t)),
      el("span", { class: "small" }, `#${l.of.index[t]} · ${l.score(t)} · ${l.of.length[t]} tok`, l.of.cut[t] ? " cut" : "", ` · lag ${l.of.lag[t]}`, marked ? ` · ${show(marked)} marked` : ""));
  }

  // The beginning of a response, once its group has come.
  preview(t) {
    if (!this.group.tokens) return "…";
    let start = 0;
    for (let i = this.listing.first[this.group.at]; i < t; i++) start += this.listing.of.length[i];
    const pieces = this.group.tokens.get("piece").subarray(start, start + Math.min(40, this.listing.of.length[t]));
    return oneLine(Array.from(pieces, (p) => this.group.pieces[p]).join(""));
  }

  // One scale for the group, so that its responses can be compared; of a large one every so many tokens count.
  scale(shade) {
    const { tokens, trajectories } = this.group;
    const versions = trajectories.flatMap((t) => t.spans.flatMap(([v, n]) => Array(n).fill(v)));
    const every = Math.ceil(versions.length / 20000);
    const values = [];
    for (let i = 0; i < versions.length; i += every) values.push(shade.of(tokens, i, versions));
    return scaleOf(values, shade);
  }

  async goGroup(g, index = 0) {
    const l = this.listing;
    this.step = l.step[g];
    this.stepInput.value = this.step;
    this.slider.value = l.steps.indexOf(this.step);
    const ids = Array.from({ length: l.size[g] }, (_, i) => l.first[g] + i);
    this.group = { at: g };
    this.trajectories.set(ids, index);
    this.about.replaceChildren();
    this.where.textContent = `Step ${this.step}, group ${l.nth(g)}, ticket ${l.number[g]}`;
    const asked = this.group;
    let group = null;
    try {
      group = await this.source.group(this.run, this.step, l.nth(g));
    } catch (error) {
      if (this.group === asked) this.say(`Not to be had: ${error.message}`);
      return;
    }
    if (this.group !== asked) return; // a later choice came first
    if (!group) {
      this.clear();
      return this.say(`This file lists the group but does not hold its tokens: areal-q report RUN --serve shows all, a larger --max-mb more. ${this.nearestHeld()}`);
    }
    Object.assign(this.group, group);
    this.trajectories.draw();
    this.goTrajectory(this.trajectories.at);
  }

  nearestHeld() {
    const held = this.listing.steps.filter((s) => this.source.has(this.run, s));
    return held.length ? `Steps it holds: ${held.slice(0, 40).join(", ")}${held.length > 40 ? " …" : ""}.` : "";
  }

  // Response `at` of the group with its own stretch of the arrays.
  response(at) {
    const { trajectories, tokens } = this.group;
    const start = trajectories.slice(0, at).reduce((sum, t) => sum + t.length, 0);
    const t = trajectories[at];
    return {
      ...t, at,
      tokens: new Map([...tokens].map(([name, a]) => [name, a.subarray(start, start + t.length)])),
      versions: t.spans.flatMap(([version, count]) => Array(count).fill(version)),
    };
  }

  goTrajectory(at) {
    if (!this.group?.tokens) return;
    const { tokens } = this.group;
    this.t = this.response(at);
    this.page = 0;
    this.token = 0;
    this.say(this.meta.runs[this.run].note || (tokens.has("logprobs") ? "" : "This run has no token log: ratios, entropy and marks are not known. buffer.tokens = true writes one."));
    this.prompt.textContent = this.group.prompt_pieces.join("");
    this.describe();
    this.paint();
    history.replaceState(null, "", `#tokens/${this.run}/${this.step}/${this.listing.nth(this.group.at)}/${at}`);
  }

  // Colours and marks of one page of tokens.
  paint() {
    if (!this.group?.tokens) return;
    const shade = SHADES[this.shade];
    const { length } = this.t;
    const scale = this.scale(shade);
    drawScale(this.legend, shade, scale);
    const from = this.page * PAGE_TOKENS, to = Math.min(length, from + PAGE_TOKENS);
    const spans = this.spans(this.t, from, to, scale);
    spans.forEach((span, n) => fill(span, { role: "option", id: `tok-${from + n}`, "data-at": from + n, "aria-selected": "false" }, []));
    this.text.replaceChildren(...spans);
    this.others.replaceChildren(...this.group.trajectories.slice(0, OTHERS).flatMap((other, at) => {
      if (at === this.t.at) return [];
      const mine = this.response(at);
      return [el("span", { class: "small" }, `#${other.index} · ${scored(other.reward, other.failure)}`),
        el("div", { class: "mini", onclick: () => this.trajectories.choose(at) }, this.spans(mine, 0, Math.min(OTHERS_TOKENS, other.length), scale))];
    }));
    const pages = Math.ceil(length / PAGE_TOKENS);
    const turn = (by) => () => { this.page += by; this.token = this.page * PAGE_TOKENS; this.paint(); };
    this.pages.replaceChildren(...(pages < 2 ? [] : [
      el("button", { disabled: this.page === 0, onclick: turn(-1) }, "‹ tokens before"),
      el("span", {}, `tokens ${from}–${to - 1} of ${length}`),
      el("button", { disabled: this.page === pages - 1, onclick: turn(1) }, "tokens after ›")]));
    this.goToken(this.token, false);
  }

  // Tokens `from` … `to` of a response, coloured and marked.
  spans(response, from, to, scale) {
    const { tokens, versions } = response;
    return Array.from({ length: to - from }, (_, n) => {
      const i = from + n;
      const text = this.group.pieces[tokens.get("piece")[i]];
      const span = el("span", { class: this.classes(response, i, text) }, text === "" ? "·" : text.replaceAll("\n", "⏎\n"));
      const share = scale.share(SHADES[this.shade].of(tokens, i, versions));
      if (share) span.style.setProperty("--share", `${Math.round(Math.min(1, Math.abs(share)) * 100)}%`);
      if (share < 0) span.classList.add("negative");
      return span;
    });
  }

  classes({ tokens, versions }, i, text) {
    const marks = tokens.get("marks")?.[i] || 0;
    const names = { clipped_up: "up", clipped_down: "down", clipped_dual: "dual", truncated: "truncated", dropped: "dropped" };
    const has = Object.entries(this.meta.marks).filter(([, bit]) => marks & bit).map(([name]) => names[name]);
    if (!tokens.get("mask")[i]) has.push("unused");
    if (i && versions[i] !== versions[i - 1]) has.push("swap");
    if (text === "" || /^‹.*›$/.test(text)) has.push("special");
    return ["tok", ...has].join(" ");
  }

  goToken(i, focus = true) {
    const page = Math.floor(i / PAGE_TOKENS);
    this.token = i;
    if (page !== this.page) { this.page = page; return this.paint(); }
    this.text.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    const span = document.getElementById(`tok-${i}`);
    span?.setAttribute("aria-selected", "true");
    this.text.setAttribute("aria-activedescendant", `tok-${i}`);
    if (focus) span?.scrollIntoView({ block: "nearest" });
    this.explain(i);
  }

  press(event) {
    if (!this.t || event.ctrlKey || event.metaKey || event.altKey) return;
    const { length } = this.t, i = this.token;
    const to = { ArrowRight: i + 1, l: i + 1, ArrowLeft: i - 1, h: i - 1, Home: 0, End: length - 1, n: this.marked(i, 1), p: this.marked(i, -1) }[event.key];
    if (to != null && to < 0 && i === 0 && event.key !== "p") this.trajectories.root.focus();
    else if (to != null) this.goToken(Math.max(0, Math.min(length - 1, to)));
    else if (event.key === "ArrowDown" || event.key === "j") this.trajectories.choose(this.trajectories.at + 1);
    else if (event.key === "ArrowUp" || event.key === "k") this.trajectories.choose(this.trajectories.at - 1);
    else return;
    event.preventDefault();
  }

  marked(from, by) {
    const marks = this.t.tokens.get("marks") || [];
    for (let i = from + by; i >= 0 && i < marks.length; i += by) if (marks[i]) return i;
    return from;
  }

  explain(i) {
    this.facts.replaceChildren(...tokenFacts(this.meta.marks, this.group, this.t, i));
  }

  describe() {
    this.about.replaceChildren(...responseFacts(this.group, this.t));
  }

  clear() {
    this.t = null;
    for (const part of [this.prompt, this.text, this.pages, this.others, this.facts, this.about, this.legend]) part.replaceChildren();
  }

  say(text) {
    this.notice.textContent = text;
  }
}

function oneLine(text) {
  return text.replaceAll("\n", "⏎");
}
