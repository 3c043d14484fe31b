// What the page knows: the run, at once; and tokens, inflated when somebody looks at them.
// Letters: T = tokens of a chunk, N = those of them that the policy sampled.

/** Make an element; children are elements or text, and text is never read as markup. */
function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else if (name in made && typeof value !== "string") made[name] = value;
    else made.setAttribute(name === "className" ? "class" : name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

const byId = (id) => document.getElementById(id);
const last = (list) => list[list.length - 1];
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

/** Write a number with about four digits that say something. */
function format(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) {
    return value.toExponential(2).replaceAll("-", "−");
  }
  const digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 1 ? 3 : 4;
  const written = value.toLocaleString("en", size < 0.1
    ? { maximumSignificantDigits: 3 } : { maximumFractionDigits: digits });
  return written.replace("-", "−");
}

/** Write seconds with a unit that fits; what is shorter than a microsecond is noise. */
function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  const size = Math.abs(seconds), rounded = (factor) => format(Math.round(seconds * factor));
  if (size < 1e-6) return "0 s";
  if (size < 1e-3) return `${rounded(1e6)} µs`;
  if (size < 1) return `${rounded(1e3)} ms`;
  if (size < 120) return `${format(Number(seconds.toFixed(size < 10 ? 2 : 1)))} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${(minutes / 60).toFixed(1)} h`;
}

/** Wait until the element is whole: the rest of the file may still be read. */
async function whole(id) {
  const isDone = () => document.readyState !== "loading" || byId(id)?.nextElementSibling;
  if (!isDone()) {
    await new Promise((resolve) => document.addEventListener("DOMContentLoaded", resolve));
  }
  return byId(id);
}

/** Return the bytes that stand compressed in an element. */
async function inflate(id) {
  const packed = (await whole(id)).textContent;
  const raw = Uint8Array.fromBase64?.(packed)
    ?? Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const readJson = async (id) => JSON.parse(new TextDecoder().decode(await inflate(id)));

/** Return the float16 with these bits. */
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** What token ids stand for: bytes, and text where the bytes are whole characters. */
class Vocabulary {
  constructor(table) {
    this.isKnown = table !== null;
    this.bytes = [];
    this.texts = [];
    this.lower = [];
    this.special = new Set(table?.special ?? []);
    const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
    (table?.ids ?? []).forEach((id, index) => {
      this.bytes[id] = Uint8Array.from(table.pieces[index], (c) => c.charCodeAt(0));
      try {
        this.texts[id] = strict.decode(this.bytes[id]);
        this.lower[id] = this.texts[id].toLowerCase();
      } catch {
        this.texts[id] = null; // part of a character
      }
    });
  }

  /** Return each token's text; a character of several tokens stands at the last, "" before. */
  pieces(ids) {
    if (!this.isKnown) return Array.from(ids, (id) => `${id} `);
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    const found = Array.from(ids, (id) => decoder.decode(this.bytes[id], { stream: true }));
    const rest = decoder.decode();
    if (found.length && rest) found[found.length - 1] += rest;
    return found;
  }

  /** Return the text of tokens in lower case, to search in. */
  searchable(ids) {
    let text = "";
    if (!this.isKnown) {
      return ids.join(" ");
    }
    for (const id of ids) {
      const piece = this.lower[id];
      if (piece === undefined) return this.pieces(ids).join("").toLowerCase();
      text += piece;
    }
    return text;
  }
}

/** The chunks, of which a few stay inflated, and the texts that were searched. */
class Tokens {
  constructor(table) {
    this.table = table;
    this.texts = [];
    this.held = new Map();
    this.places = []; // of each row: its chunk, and where it begins in T and in N
    let row = 0;
    table.chunks.forEach((count, chunk) => {
      let t = 0, n = 0;
      for (const end = row + count; row < end; row++) {
        this.places.push({ chunk, t, n });
        t += table.num_tokens[row];
        n += table.trained_tokens[row];
      }
    });
  }

  async vocabulary() {
    this.end ??= readJson("end").then((end) => new Vocabulary(end.vocabulary));
    return this.end;
  }

  _inflated(name) {
    const found = this.held.get(name) ?? inflate(name);
    this.held.delete(name);
    this.held.set(name, found);
    if (this.held.size > 16) this.held.delete(this.held.keys().next().value);
    return found;
  }

  /** Return the ids of a row's tokens. */
  _ids(planes, row) {
    const size = planes.length / 3;
    const { t } = this.places[row];
    const ids = new Int32Array(this.table.num_tokens[row]);
    for (let i = 0; i < ids.length; i++) {
      ids[i] = planes[t + i] | (planes[size + t + i] << 8) | (planes[2 * size + t + i] << 16);
    }
    return ids;
  }

  /** Return all that is known of a row's tokens; arrays are of its T, NaN where not sampled. */
  async of(row) {
    const { chunk, t, n } = this.places[row];
    const vocabulary = await this.vocabulary();
    const [planes, rest] = await Promise.all([
      this._inflated(`t${chunk}`), this._inflated(`x${chunk}`),
    ]);
    const ids = this._ids(planes, row);
    const size = planes.length / 3;
    const mask = rest.subarray(t, t + ids.length);
    const sampled = rest.subarray(0, size).reduce((sum, bit) => sum + bit, 0);
    const plane = (index) => rest.subarray(size + index * sampled, size + (index + 1) * sampled);
    const bits = (field, at) => plane(2 * field)[at] | (plane(2 * field + 1)[at] << 8);
    const found = { ids, mask, vocabulary, pieces: vocabulary.pieces(ids), rewards: new Map() };
    const names = ["versions", "logprobs", "advantages", "differences"];
    for (const name of names) found[name] = new Float64Array(ids.length).fill(NaN);
    for (let i = 0, at = n; i < ids.length; i++) {
      if (!mask[i]) continue;
      found.versions[i] = this.table.oldest_version[row] + bits(0, at);
      for (let field = 1; field < 4; field++) found[names[field]][i] = half(bits(field, at));
      at++;
    }
    const pairs = new DataView(rest.buffer, rest.byteOffset + size + 8 * sampled);
    for (let at = 0; at < pairs.byteLength; at += 8) {
      const place = pairs.getUint32(at, true) - t;
      if (place >= 0 && place < ids.length) {
        found.rewards.set(place, pairs.getFloat32(at + 4, true));
      }
    }
    found.segments = this.table.segment_lengths[row];
    return found;
  }

  /** Find text in all rows: `each(row, isIn)`; stops once `isOld()` is true. */
  async search(words, each, isOld) {
    const vocabulary = await this.vocabulary();
    const { chunks } = this.table;
    const ahead = (chunk, row) => chunk < chunks.length && this.texts.length < row + chunks[chunk]
      ? inflate(`t${chunk}`) : null;
    let row = 0, next = ahead(0, 0);
    for (const [chunk, count] of chunks.entries()) {
      const planes = await next;
      if (isOld()) return;
      next = ahead(chunk + 1, row + count);
      for (const end = row + count; row < end; row++) {
        if (planes) this.texts[row] = vocabulary.searchable(this._ids(planes, row));
        each(row, this.texts[row].includes(words));
      }
      if (chunk % 32 === 31) await new Promise((resolve) => setTimeout(resolve));
    }
  }
}
