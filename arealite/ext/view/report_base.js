// Elements, numbers as text, and the compressed blocks of the file.

/** Make an element. Children are elements or text; text is never read as markup. */
function make(tag, { style, dataset, ...properties } = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  Object.assign(made.style, style);
  Object.assign(made.dataset, dataset);
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

const find = (selector) => document.querySelector(selector);
const isNumber = Number.isFinite;
const sum = (list) => list.reduce((total, value) => total + value, 0);
const count = new Intl.NumberFormat("en").format;
const plural = (value, word, words = `${word}s`) => `${count(value)} ${value === 1 ? word : words}`;

const DIGITS = new Intl.NumberFormat("en",
  { maximumSignificantDigits: 4, maximumFractionDigits: 0, roundingPriority: "morePrecision" });

/** Write a number with about four significant digits. */
function format(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  const isPlain = size === 0 || (size >= 1e-3 && size < 1e9);
  return (isPlain ? DIGITS.format(value) : value.toExponential(2)).replaceAll("-", "−");
}

/** Write seconds with a suitable unit, down to microseconds. */
function duration(seconds) {
  const size = Math.abs(seconds ?? NaN);
  if (size < 1e-6) return "0 s";
  if (size < 1e-3) return `${format(Math.round(seconds * 1e6))} µs`;
  if (size < 1) return `${format(Math.round(seconds * 1e3))} ms`;
  if (size < 120) return `${format(Number(seconds.toFixed(size < 10 ? 2 : 1)))} s`;
  if (size < 7200) return `${Math.round(seconds / 60)} min`;
  return isNumber(size) ? `${(seconds / 3600).toFixed(1)} h` : "–";
}

const loaded = new Promise((resolve) => document.addEventListener("DOMContentLoaded", resolve));

/** Replace the content of a section below its title. */
const fill = (name, ...children) => find(`#${name}`).replaceChildren(find(`#${name} h2`), ...children);

const ask = (name, version) => fetch(`${name}${location.search}&version=${version}`);

/** Return the bytes of a block, as soon as the browser has read it; on a live page from the server. */
async function inflate(id, version) {
  if (version) {
    const bytes = new Uint8Array(await (await ask(id, version)).arrayBuffer());
    return bytes.length ? bytes : new Promise(() => {}); // an old version's; its page is drawn again soon
  }
  if (!document.getElementById(id)?.nextElementSibling) await loaded;
  const packed = new Blob([Uint8Array.fromBase64(document.getElementById(id).textContent)]);
  const stream = packed.stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const readJson = async (...block) => JSON.parse(new TextDecoder().decode(await inflate(...block)));
