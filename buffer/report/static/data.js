"use strict";

// Chunks as chunks.py packs them, and where they come from: this file, or the server that sent the page.

const ARRAYS = { uint8: Uint8Array, int32: Int32Array, float32: Float32Array, float64: Float64Array };

async function unpack(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const arrays = new Map();
  for (const [name, dtype, offset, count] of header.arrays) {
    arrays.set(name, new ARRAYS[dtype](buffer, 4 + length + offset, count));
  }
  return { meta: header.meta, arrays };
}

// The groups of a chunk, each with its own stretch of the arrays.
function splitGroups({ meta, arrays }) {
  let start = 0;
  return meta.groups.map((group) => {
    const length = group.trajectories.reduce((sum, t) => sum + t.length, 0);
    const tokens = new Map([...arrays].map(([name, a]) => [name, a.subarray(start, start + length)]));
    start += length;
    return { ...group, step: meta.step, pieces: meta.pieces, tokens };
  });
}

class FileSource {
  constructor() {
    this.live = false;
    this.elements = new Map();
    this.blocks = new Map(); // "run/step" to the blocks of its groups
    for (const element of document.querySelectorAll("script.chunk")) {
      const name = element.dataset.name;
      this.elements.set(name, element);
      const [kind, run, step, first, count] = name.split("/");
      if (kind !== "groups") continue;
      const key = `${run}/${step}`;
      if (!this.blocks.has(key)) this.blocks.set(key, []);
      this.blocks.get(key).push({ first: +first, count: +count, name, groups: null });
    }
  }

  read(name) {
    const binary = atob(this.elements.get(name).textContent);
    return unpack(Uint8Array.from(binary, (c) => c.charCodeAt(0)));
  }

  overview() {
    return this.read("overview");
  }

  index(run) {
    return this.read(`index/${run}`);
  }

  has(run, step) {
    return this.blocks.has(`${run}/${step}`);
  }

  // Group n of a step, or null where it is not in this file.
  async group(run, step, n) {
    const blocks = this.blocks.get(`${run}/${step}`) || [];
    const block = blocks.find((b) => n >= b.first && n < b.first + b.count);
    if (!block) return null;
    block.groups ||= this.read(block.name).then(splitGroups);
    return (await block.groups)[n - block.first];
  }
}

class ServedSource {
  constructor() {
    this.live = true;
    this.tags = new Map();
    this.cache = new Map();
  }

  // The chunk, or null where it is as it was.
  async fetch(path) {
    const tag = this.tags.get(path);
    const answer = await fetch(`data/${path}`, tag ? { headers: { "If-None-Match": tag } } : {});
    if (answer.status === 304) return null;
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    if (answer.headers.has("ETag")) this.tags.set(path, answer.headers.get("ETag"));
    return unpack(await answer.arrayBuffer());
  }

  overview() {
    return this.fetch("overview");
  }

  index(run) {
    return this.fetch(`index/${run}`);
  }

  has() {
    return true;
  }

  async group(run, step, n) {
    const path = `groups/${run}/${step}/${n}/1`;
    if (!this.cache.has(path)) {
      if (this.cache.size > 200) this.cache.delete(this.cache.keys().next().value);
      this.cache.set(path, splitGroups(await this.fetch(path))[0]);
    }
    return this.cache.get(path);
  }
}
