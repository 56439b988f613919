// The list of all trajectories of a run, and the orders in which the viewer walks through it.

const RUN_WIDE = 200;

class Listing {
  constructor({ meta, arrays }) {
    this.prompts = meta.prompts;
    this.causes = meta.causes;
    this.loggedSteps = meta.logged_steps;
    for (const name of ["step", "place", "number", "size"]) this[name] = arrays.get(`group/${name}`);
    this.of = Object.fromEntries(["index", "length", "lag", "cut", "failed", "reward", "gap", "marked"].map((n) => [n, arrays.get(`trajectory/${n}`)]));
    this.first = new Int32Array(this.size.length); // of a group, among all trajectories
    this.bounds = new Map(); // step to [first group, one past the last]
    let sum = 0;
    for (let g = 0; g < this.size.length; g++) {
      this.first[g] = sum;
      sum += this.size[g];
      const bound = this.bounds.get(this.step[g]);
      if (bound) bound[1] = g + 1;
      else this.bounds.set(this.step[g], [g, g + 1]);
    }
    this.steps = [...this.bounds.keys()].sort((a, b) => a - b);
    this.total = sum;
  }

  // Place of a group among those of its step, as chunks count them.
  nth(g) {
    return g - this.bounds.get(this.step[g])[0];
  }

  reduce(g, name, f, start) {
    let value = start;
    for (let t = this.first[g]; t < this.first[g] + this.size[g]; t++) value = f(value, this.of[name][t]);
    return value;
  }

  // Mean over the responses that were scored; NaN where none was.
  reward(g) {
    const scored = this.size[g] - this.unscored(g);
    return scored ? this.reduce(g, "reward", (a, b) => a + b, 0) / scored : NaN;
  }

  unscored(g) {
    return this.reduce(g, "failed", (count, cause) => count + (cause > 0), 0);
  }

  // The reward of a trajectory in words.
  score(t) {
    return scored(this.of.reward[t], this.causes[this.of.failed[t]]);
  }

  largest(g, name) {
    return this.reduce(g, name, (a, b) => Math.max(a, Number.isNaN(b) ? 0 : b), 0);
  }

  // Groups by ORDERS[name]; a run-wide order gives the first RUN_WIDE of all steps.
  ordered(name, step) {
    const order = ORDERS[name];
    const [from, to] = order.wide ? [0, this.size.length] : this.bounds.get(step) || [0, 0];
    const groups = Array.from({ length: to - from }, (_, i) => from + i);
    if (!order.by) return groups;
    const keys = new Map(groups.map((g) => [g, order.by(this, g)]));
    groups.sort((a, b) => keys.get(b) - keys.get(a) || a - b);
    return order.wide ? groups.slice(0, RUN_WIDE) : groups;
  }
}

function scored(reward, cause) {
  return cause ? `not scored: ${cause}` : `r ${show(reward, 3)}`;
}

const ORDERS = {
  used: { says: "this step: as used" },
  reward: { says: "this step: lowest reward", by: (l, g) => (l.unscored(g) === l.size[g] ? -Infinity : -l.reward(g)) },
  gap: { says: "this step: largest mismatch", by: (l, g) => l.largest(g, "gap") },
  marked: { says: "this step: most clipped or masked", by: (l, g) => l.largest(g, "marked") },
  allGap: { says: "whole run: largest mismatch", wide: true, by: (l, g) => l.largest(g, "gap") },
  allMarked: { says: "whole run: most clipped or masked", wide: true, by: (l, g) => l.largest(g, "marked") },
  allLong: { says: "whole run: longest response", wide: true, by: (l, g) => l.largest(g, "length") },
  allStale: { says: "whole run: stalest", wide: true, by: (l, g) => l.largest(g, "lag") },
};
