// What a token's colour can mean, and its scale.

const SHADES = {
  ratio: { says: "policy ratio R = π_θ/π_prox", signed: true, exp: true, of: (t, i) => minus(t, "logprobs", "proximal_logprobs", i) },
  mismatch: { says: "mismatch w = π_prox/π_behav", signed: true, exp: true, of: (t, i) => minus(t, "proximal_logprobs", "behavior_logprobs", i) },
  advantage: { says: "advantage", signed: true, of: (t, i) => t.get("advantages")?.[i] },
  entropy: { says: "entropy, nats", of: (t, i) => t.get("entropy")?.[i] },
  version: { says: "version that drew it", discrete: true, of: (t, i, versions) => versions[i] },
  surprise: { says: "−log π_behav, nats", of: (t, i) => -t.get("behavior_logprobs")[i] },
};
function minus(t, a, b, i) {
  return t.has(a) && t.has(b) ? t.get(a)[i] - t.get(b)[i] : undefined;
}

// Where on the scale a value is: -1 … 1, or 0 … 1. Its end is the 99th percentile, so that one token does not
// take the colour of all others.
function scaleOf(values, shade) {
  const finite = values.filter((v) => v != null && !Number.isNaN(v));
  if (!finite.length) return { known: false, share: () => 0 };
  if (shade.discrete) {
    const low = Math.min(...finite), high = Math.max(...finite);
    return { known: true, low, high, share: (v) => (high === low ? 0.5 : 0.15 + (0.85 * (v - low)) / (high - low)) };
  }
  const sizes = finite.map(Math.abs).sort((a, b) => a - b);
  const end = sizes[Math.ceil((sizes.length - 1) * 0.99)] || sizes[sizes.length - 1] || 1e-9;
  return { known: true, low: shade.signed ? -end : 0, high: end, share: (v) => (v == null || Number.isNaN(v) ? 0 : v / end) };
}

function drawScale(root, shade, scale) {
  const text = (v) => (shade.exp ? show(Math.exp(v), 3) : show(v, 3));
  root.replaceChildren(...(scale.known
    ? [el("span", {}, text(scale.low)), el("span", { class: `ramp ${shade.signed ? "signed" : ""}` }), el("span", {}, text(scale.high))]
    : [el("span", {}, "not logged")]));
}
