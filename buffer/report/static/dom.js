// Elements, numbers and files. Text only ever becomes a text node: there is no innerHTML in this page.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function show(value, digits = 4) {
  if (value == null || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

// Round numbers between low and high, about `count` and at least three of them.
function ticks(low, high, count) {
  for (let n = count; n < 16 * count; n *= 2) {
    const out = ticksOf(low, high, n);
    if (out.length > 2 || high <= low) return out;
  }
  return ticksOf(low, high, count);
}

function ticksOf(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((m) => m * power >= rough * 0.999) * power;
  const out = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-6; t += step) out.push(Math.abs(t) < step / 1e6 ? 0 : t);
  return out;
}

function cell(value) {
  if (value == null || Number.isNaN(value)) return "";
  const text = String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function download(name, rows) {
  const text = rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

// A listbox: one tab stop, the choice by arrows, j and k, Home and End.
class Listbox {
  constructor(label, render, chosen, keys = {}) {
    this.render = render;
    this.chosen = chosen;
    this.keys = keys;
    this.items = [];
    this.at = -1;
    this.root = el("div", { role: "listbox", tabindex: 0, "aria-label": label, class: "listbox" });
    this.root.addEventListener("keydown", (event) => this.press(event));
    this.root.addEventListener("click", (event) => {
      const option = event.target.closest("[role=option]");
      if (option) this.choose(+option.dataset.at);
    });
  }

  // Long lists are drawn around the choice only.
  set(items, at) {
    this.items = items;
    this.at = Math.max(0, Math.min(at, items.length - 1));
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.min(this.at - 150, this.items.length - 300));
    const last = Math.min(this.items.length, first + 300);
    const rows = [];
    if (first) rows.push(el("p", { class: "more" }, `${first} before`));
    for (let i = first; i < last; i++) {
      const id = `${this.root.id}-${i}`;
      const attributes = { role: "option", id, "data-at": i, "aria-selected": i === this.at ? "true" : "false" };
      rows.push(fill(this.render(this.items[i], i), attributes, []));
    }
    if (last < this.items.length) rows.push(el("p", { class: "more" }, `${this.items.length - last} more`));
    this.root.replaceChildren(...rows);
    this.root.setAttribute("aria-activedescendant", `${this.root.id}-${this.at}`);
    this.root.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" });
  }

  choose(at) {
    if (!this.items.length) return;
    this.at = Math.max(0, Math.min(at, this.items.length - 1));
    this.draw();
    this.chosen(this.items[this.at], this.at);
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = {
      ArrowDown: this.at + 1, j: this.at + 1, ArrowUp: this.at - 1, k: this.at - 1,
      Home: 0, End: this.items.length - 1, PageDown: this.at + 10, PageUp: this.at - 10,
    };
    if (event.key in moves) this.choose(moves[event.key]);
    else if (event.key in this.keys) this.keys[event.key]();
    else return;
    event.preventDefault();
  }
}
