// Puts the parts together: tabs, the address behind #, and a look for news where the page is served.

const REFRESH_MS = 3000;
const TABS = ["curves", "tokens", "answers"];

async function main() {
  const source = document.body.dataset.source === "served" ? new ServedSource() : new FileSource();
  const viewer = new Viewer(document.getElementById("tokens"), source);
  const curves = new Curves(document.getElementById("curves"), (step) => openTokens(0, step));
  let data = null;
  let opened = false;

  function activate(tab) {
    document.body.dataset.tab = tab;
    for (const name of TABS) {
      const on = name === tab;
      document.getElementById(name).hidden = !on;
      const button = document.getElementById(`tab-${name}`);
      button.setAttribute("aria-selected", on ? "true" : "false");
      button.tabIndex = on ? 0 : -1;
    }
    if (tab === "curves") curves.redraw();
    if (tab === "answers") answers();
  }

  // When they are turned to; whoever reads them is not disturbed by news.
  function answers() {
    buildAnswers(document.getElementById("answers"), data);
  }

  async function openTokens(run, step, group = 0, trajectory = 0) {
    activate("tokens");
    opened = true;
    await viewer.open(run, step, group, trajectory);
  }

  async function follow() {
    const [tab, ...place] = location.hash.slice(1).split("/");
    if (tab === "tokens") {
      const [run, step, group, trajectory] = place.map(Number);
      if (!opened || place.length) await openTokens(run < data.meta.runs.length ? run : 0, step || 0, group || 0, trajectory || 0);
      else activate("tokens");
    } else activate(TABS.includes(tab) ? tab : "curves");
  }

  function header() {
    const { runs } = data.meta;
    document.getElementById("names").textContent = runs.length > 3 ? `${runs.length} runs` : runs.map((run) => run.name).join(" · ");
    const logged = runs.reduce((sum, run) => sum + run.logged.trajectories, 0);
    const thinned = runs.some((run) => run.thinned > 1) ? " · curves averaged to 2,000 points" : "";
    document.getElementById("status").textContent =
      `${runs.length > 1 ? "" : `${runs[0].title}; `}${logged.toLocaleString("en")} trajectories logged${thinned}`;
    document.getElementById("summary")?.remove();
    if (runs.length === 1) {
      document.getElementById("header").insertBefore(
        el("dl", { id: "summary" }, runs[0].rows.map(([name, value]) =>
          el("div", value.startsWith("✗") ? { class: "bad" } : {}, el("dt", {}, name), el("dd", {}, value)))),
        document.getElementById("tabs"));
    }
  }

  async function refresh() {
    const news = await source.overview();
    if (!news) return;
    data = news;
    curves.build(data);
    viewer.build(data.meta);
    curves.redraw();
    if (opened) await viewer.refresh();
    header();
  }

  const tabs = document.getElementById("tabs");
  tabs.addEventListener("click", (event) => {
    const name = event.target.id?.replace("tab-", "");
    if (!TABS.includes(name)) return;
    if (name === "tokens" && opened) activate("tokens");
    else location.hash = name;
    if (location.hash === `#${name}`) follow();
  });
  tabs.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    const now = TABS.findIndex((name) => `tab-${name}` === document.activeElement.id);
    const next = document.getElementById(`tab-${TABS[(now + by + TABS.length) % TABS.length]}`);
    next.focus();
    next.click();
  });
  addEventListener("hashchange", follow);

  await refresh();
  await follow();
  document.body.dataset.ready = "true";
  if (source.live) {
    setInterval(async () => {
      if (document.hidden) return;
      try {
        await refresh();
        document.body.classList.remove("away");
      } catch {
        document.body.classList.add("away"); // the server has ended: what is shown stays
      }
    }, REFRESH_MS);
  }
}

main();
