// Curves and bars. A chart is paths in an SVG that stretches with its card, and words around it, so
// nothing is drawn again when the window changes. All charts over steps share one cursor.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000, HEIGHT = 300;
const cursors = new Set(); // of charts over steps: functions of a step, or of null

function shape(kind, attributes) {
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** Return the smallest and the largest number of arrays, apart where they are one. */
function bounds(arrays) {
  let low = Infinity, high = -Infinity;
  for (const array of arrays) {
    for (const value of array) {
      if (isNumber(value)) {
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
  }
  if (low > high) return [0, 1];
  if (low === 0 && high === 0) return [0, 1];
  if (low === high) return [low - (Math.abs(low) || 1) * 0.05, high + (Math.abs(low) || 1) * 0.05];
  return [low, high];
}

/** Return the index of the entry of an ascending array that is nearest. */
function nearest(array, value) {
  let low = 0, high = array.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (array[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - array[low - 1] < array[low] - value ? low - 1 : low;
}

function linePath(xs, ys, x, y) {
  let path = "", pen = "M";
  for (let i = 0; i < xs.length; i++) {
    if (!isNumber(ys[i])) {
      pen = "M";
      continue;
    }
    path += `${pen}${x(xs[i]).toFixed(1)} ${y(ys[i]).toFixed(1)}`;
    pen = "L";
  }
  return path;
}

/** Points are lines without length and with round ends: they stay round however the SVG stretches. */
function pointPath(xs, ys, x, y) {
  let path = "";
  xs.forEach((at, i) => {
    if (isNumber(ys[i])) path += `M${x(at).toFixed(1)} ${y(ys[i]).toFixed(1)}h0`;
  });
  return path;
}

/**
 * Draw a card: series are {label, x, y, points}. `over` names the axis; charts over "step" share
 * their cursor.
 */
function chart({ title, series, over = "step", zero = false }) {
  series = series.filter((one) => one.y?.some(isNumber));
  if (!series.length) return null;
  const [left, right] = bounds(series.map((one) => one.x));
  let [low, high] = bounds(series.map((one) => one.y));
  if (zero) low = Math.min(low, 0);
  const write = series[0].write ?? format;
  const x = (value) => ((value - left) / (right - left || 1)) * WIDTH;
  const y = (value) => HEIGHT - 8 - ((value - low) / (high - low || 1)) * (HEIGHT - 16);
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" });
  svg.append(shape("path", { class: "rule", d: `M0 8H${WIDTH}M0 150H${WIDTH}M0 292H${WIDTH}` }));
  const lines = series.map((one, index) => {
    const draw = one.points ? pointPath : linePath;
    const kind = `s${index} ${one.points || one.x.length === 1 ? "points" : "line"}`;
    const path = one.x.length === 1 ? pointPath : draw;
    const line = shape("path", { class: kind, d: path(one.x, one.y, x, y) });
    svg.append(line);
    return line;
  });
  const cursor = shape("path", { class: "cursor", d: "" });
  svg.append(cursor);
  const values = series.map((one, index) => make("b", { className: `s${index}` }));
  const labels = series.map((one, index) =>
    make("span", { title: one.told ?? "" },
      series.length > 1 ? make("i", { className: `key s${index}` }) : null,
      series.length > 1 ? `${one.label} ` : null, values[index]));
  const place = make("span", { className: "place" });
  const show = (at) => {
    series.forEach((one, i) => {
      const index = at === null ? one.y.findLastIndex(isNumber) : nearest(one.x, at);
      values[i].textContent = (one.write ?? format)(one.y[index]);
    });
    place.textContent = at === null ? "" : `${over} ${format(at)}`;
    cursor.setAttribute("d", at === null ? "" : `M${x(at).toFixed(1)} 0V${HEIGHT}`);
  };
  show(null);
  const move = (event) => {
    const box = svg.getBoundingClientRect();
    const wanted = left + ((event.clientX - box.left) / box.width) * (right - left);
    const longest = series.reduce((a, b) => (b.x.length > a.x.length ? b : a));
    const at = longest.x[nearest(longest.x, wanted)];
    if (over === "step") cursors.forEach((each) => each(at));
    else show(at);
  };
  const leave = () => (over === "step" ? cursors.forEach((each) => each(null)) : show(null));
  if (over === "step") cursors.add((at) => show(at === null || at < left || at > right ? null : at));
  lines[0].after(...lines.slice(1));
  const about = series.length > 1 ? "" : series[0].told ?? "";
  return make("figure", { className: "card" },
    make("figcaption", {}, make("span", { className: "title", title: about }, title), place),
    make("div", { className: "values" }, labels),
    make("div", { className: "plot", onpointermove: move, onpointerleave: leave },
      make("span", { className: "high" }, write(high)), make("span", { className: "low" }, write(low)),
      svg),
    make("div", { className: "axis" }, make("span", {}, `${over} ${format(left)}`),
      make("span", {}, format(right))));
}

/** Draw shares of each step as bands on top of each other: bands are {label, tone, y}, of counts. */
function stack({ title, x: xs, bands }) {
  const totals = xs.map((_, i) => bands.reduce((sum, band) => sum + band.y[i], 0) || 1);
  const [left, right] = bounds([xs]);
  const x = (value) => ((value - left) / (right - left || 1)) * WIDTH;
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" });
  const under = xs.map(() => 0);
  for (const band of bands) {
    const top = under.map((base, i) => base + band.y[i] / totals[i]);
    const edge = (level) => xs.map((at, i) => `${x(at).toFixed(1)} ${(HEIGHT * (1 - level[i])).toFixed(1)}`);
    const path = `M${edge(top).join("L")}L${edge(under).reverse().join("L")}Z`;
    const area = shape("path", { d: path });
    area.style.fill = band.tone;
    svg.append(area);
    top.forEach((level, i) => (under[i] = level));
  }
  const cursor = shape("path", { class: "cursor", d: "" });
  svg.append(cursor);
  const values = bands.map(() => make("b"));
  const place = make("span", { className: "place" });
  const all = totals.reduce((a, b) => a + b, 0);
  const show = (at) => {
    const i = at === null ? -1 : nearest(xs, at);
    bands.forEach((band, n) => {
      const share = i < 0 ? band.y.reduce((a, b) => a + b, 0) / all : band.y[i] / totals[i];
      values[n].textContent = `${(100 * share).toFixed(0)} %`;
    });
    place.textContent = i < 0 ? "" : `step ${xs[i]}`;
    cursor.setAttribute("d", i < 0 ? "" : `M${x(xs[i]).toFixed(1)} 0V${HEIGHT}`);
  };
  show(null);
  cursors.add((at) => show(at === null || at < left || at > right ? null : at));
  const move = (event) => {
    const box = svg.getBoundingClientRect();
    const wanted = left + ((event.clientX - box.left) / box.width) * (right - left);
    cursors.forEach((each) => each(xs[nearest(xs, wanted)]));
  };
  const leave = () => cursors.forEach((each) => each(null));
  const labels = bands.map((band, n) => make("span", {},
    make("i", { className: "key", style: { background: band.tone } }), `${band.label} `, values[n]));
  return make("figure", { className: "card" },
    make("figcaption", {}, make("span", { className: "title" }, title), place),
    make("div", { className: "values" }, labels),
    make("div", { className: "plot", onpointermove: move, onpointerleave: leave },
      make("span", { className: "high" }, "100 %"), make("span", { className: "low" }, "0"), svg),
    make("div", { className: "axis" }, make("span", {}, `step ${format(left)}`),
      make("span", {}, format(right))));
}

/** Return percentages with one digit that add up to 100.0: the largest remainders are rounded up. */
function percentages(parts) {
  const total = parts.reduce((a, b) => a + b, 0) || 1;
  const exact = parts.map((part) => (1000 * part) / total);
  const floor = exact.map(Math.floor);
  const missing = 1000 - floor.reduce((a, b) => a + b, 0);
  const order = exact.map((_, i) => i).sort((a, b) => exact[b] - floor[b] - (exact[a] - floor[a]));
  for (const i of order.slice(0, missing)) floor[i]++;
  return floor.map((tenths) => tenths / 10);
}

/** Draw a role's seconds as one bar of shares, the largest first, with what each is. */
function shares(role, parts, note, words) {
  const names = Object.keys(parts).filter((name) => parts[name] > 0);
  names.sort((a, b) => parts[b] - parts[a]);
  const percent = percentages(names.map((name) => parts[name]));
  const bar = make("div", { className: "bar" });
  const list = make("ul");
  names.forEach((name, i) => {
    const tone = `tone${Math.min(i, 7)}`;
    const label = words[name] ?? name, told = `${label} ${percent[i].toFixed(1)} % (${duration(parts[name])})`;
    bar.append(make("span", { className: tone, title: told, style: { flexGrow: String(parts[name]) } }));
    list.append(make("li", { className: percent[i] < 0.05 ? "tiny" : "" },
      make("i", { className: `key ${tone}` }), `${label} `,
      make("b", { "data-share": String(percent[i]) }, `${percent[i].toFixed(1)} %`)));
  });
  return make("div", { className: "role", "data-role": role },
    make("h3", {}, role, make("small", {}, note)), make("div", {}, bar, list));
}
