// What is known of a token, and of its response.

const MARK_SAYS = {
  clipped_up: "clipped: ratio over its bound, A > 0",
  clipped_down: "clipped: ratio under its bound, A < 0",
  clipped_dual: "clipped: ratio over its bound, A < 0",
  truncated: "mismatch weight truncated",
  dropped: "masked out by the objective",
};

function tokenFacts(marks, group, { tokens, versions }, i) {
  const get = (name) => tokens.get(name)?.[i];
  const found = Object.entries(marks).filter(([, bit]) => (get("marks") || 0) & bit).map(([name]) => MARK_SAYS[name]);
  return [el("h3", {}, "Token ", el("code", {}, JSON.stringify(group.pieces[get("piece")]))), facts([
    ["position, id", `${i}, ${get("id")}`],
    ["log π_behav", show(get("behavior_logprobs"))], ["log π_prox", show(get("proximal_logprobs"))], ["log π_θ", show(get("logprobs"))],
    ["mismatch w", ratioText(SHADES.mismatch.of(tokens, i))], ["policy ratio R", ratioText(SHADES.ratio.of(tokens, i))],
    ["entropy", show(get("entropy"))], ["advantage", show(get("advantages"))],
    ["version, lag", `${versions[i]}, ${show(get("lag") ?? group.step - versions[i])}`],
    ["marks", get("mask") ? found.join("; ") || "none" : "not counted (loss mask)"],
  ])];
}

function responseFacts(group, t) {
  const s = group.sampling;
  const began = new Date(group.started_s * 1000).toISOString().slice(0, 19).replace("T", " ");
  return [el("h3", {}, `Response #${t.index}`), facts([
    ["reward", t.failure ? `not scored: ${t.failure}` : show(t.reward)], ...t.parts.map(([name, value]) => [`· ${name}`, show(value)]), ...t.notes.map(([name, text]) => [`· ${name}`, text]),
    ["expected", group.answer], ["finish", t.finish], ["tokens", show(t.length)],
    ["versions", t.spans.map(([v, n, digest]) => `${v} × ${n} (${digest.slice(0, 8)})`).join(", ")],
    ["ticket", `${group.number}, admitted at ${group.admitted}, used at ${group.step}`],
    ...(group.source ? [["task", group.source]] : []), ...(group.why ? [["drawn", group.why]] : []),
    ["seed", `${group.seed} + ${t.index}`],
    ["worker", `${group.worker}, ${group.engine} ${group.weight_format}`],
    ["sampling", `T ${s.temperature}, top-p ${s.top_p}, top-k ${s.top_k}, ≤ ${s.max_tokens} tokens`],
    ["generated", `${began} UTC, in ${show(group.finished_s - group.started_s, 3)} s`],
    ["look inside", `areal-q replay RUN --step ${group.step} --debug`],
  ])];
}

function facts(rows) {
  return el("dl", {}, rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function ratioText(log) {
  return log == null ? "–" : `${show(Math.exp(log))}  (log ${show(log, 3)})`;
}
