// Curves, drawn by uPlot. All charts over steps share one cursor.

const SECONDS = /^(?!.*_per_s$).*(_s|\/seconds_\w+)$|\/wait\//; // metrics that are seconds
const DARK = matchMedia("(prefers-color-scheme: dark)");
const cards = new Map(); // of each card its data, a function that makes its plot, then the plot
const CARD_SIZES = new ResizeObserver((entries) => { // of width 0 in a closed group
  for (const { target, contentRect: { width } } of entries) {
    const card = cards.get(target);
    if (!card.plot) card.plot = card.make(width);
    else if (width) card.plot.setSize({ width, height: card.plot.height });
  }
});
DARK.addEventListener("change", () => cards.forEach(({ plot }) => plot?.redraw(false)));

/**
 * Return a line of a chart: a metric over steps. A step that did not measure the metric is null, a gap
 * in the curve. Where there is only an evaluation, or none, the value is undefined: the curve goes on.
 */
function lineOf({ metrics, descriptions }, label, name) {
  const isGap = (at) => !name.startsWith("eval/") && isNumber(metrics["time/step_s"]?.[at]);
  const y = metrics[name]?.map((value, at) => value ?? (isGap(at) ? null : undefined));
  return { label, y, about: descriptions[name] ?? "", write: SECONDS.test(name) ? duration : format };
}

/** Return the indices of values between two gaps, which a line does not show. */
function isolated(y) {
  const steps = [...y.keys()].filter((at) => y[at] !== undefined), isEmpty = (at) => !isNumber(y[at]);
  return steps.filter((at, i) => !isEmpty(at) && isEmpty(steps[i - 1]) && isEmpty(steps[i + 1]));
}

/** Give a chart of a live page new data; the reader's zoom and hidden lines stay. */
function renew(card, x, drawn) {
  const { min, max } = card.plot?.scales.x ?? {}, isZoomed = min > card.x[0] || max < card.x.at(-1);
  Object.assign(card, { x, drawn });
  card.plot?.setData([x, ...drawn.map(({ y }) => y)], !isZoomed);
  if (isZoomed) card.plot.setScale("x", { min, max });
  return card.element;
}

/**
 * Return a card with lines over x, or null if there is no number. A line is {label, y} and may have
 * `write` (number to text), `about` (a tooltip), `fill` (the colour of the band between this line and
 * the one before) and `value` (index, or null for all, to the text of the legend).
 */
function chart(title, x, lines, { over = "step", height = 150 } = {}) {
  const drawn = lines.filter(({ y }) => y?.some(isNumber));
  if (!drawn.length) return null;
  const key = [title, ...drawn.map(({ label }) => label)].join();
  const known = [...cards.values()].find((card) => card.key === key);
  if (known) return renew(known, x, drawn);
  const only = drawn.length === 1 ? drawn[0] : {};
  const element = make("figure", { className: "card" }, make("figcaption", { title: only.about ?? "" }, title));
  const inkOf = (plot, i) => getComputedStyle(plot.root.querySelectorAll(".u-series")[i]).color;
  const axis = { stroke: (plot) => inkOf(plot, 0), font: "11px system-ui", ticks: { show: false },
    grid: { stroke: "#8883", width: 1 } };
  const write = drawn[0].write ?? format, isStacked = Boolean(drawn[0].fill);
  const card = { key, element, x, drawn, plot: null };
  card.make = (width) => new uPlot({
    width, height,
    scales: { x: { time: false }, ...(isStacked ? { y: { range: [0, 1] } } : {}) },
    cursor: { y: false, hover: { skip: [undefined] }, sync: over === "step" ? { key: over } : undefined },
    axes: [{ ...axis, size: 24 },
      { ...axis, size: 62, space: 20, values: (_, ticks) => ticks.map((tick) => write(tick)) }],
    legend: { markers: { show: isStacked || !only.y, width: 0, fill: (_, i) => drawn[i - 1].fill ?? "currentColor" } },
    series: [{ label: over, value: (_, at) => (isStacked ? at ?? "all" : format(at ?? card.x.at(-1))) },
      ...drawn.map((line, i) => ({
        label: make("span", { title: line.about ?? "" }, only === line && !isStacked ? "" : line.label),
        class: isStacked ? null : `s${i}`, width: isStacked ? 0 : 1.5, fill: line.fill,
        stroke: (plot) => inkOf(plot, i + 1),
        points: { show: () => !isStacked && card.drawn[i].y.filter(isNumber).length < 30, size: 5,
          filter: (_, __, isShown) => (isShown || isStacked ? null : isolated(card.drawn[i].y)) },
        value: (_, value, __, at) => card.drawn[i].value?.(at)
          ?? (line.write ?? format)(at === null ? card.drawn[i].y.findLast(isNumber) : value),
      }))],
    bands: drawn.slice(isStacked ? 1 : drawn.length).map((_, i) => ({ series: [i + 2, i + 1] })),
  }, [card.x, ...card.drawn.map(({ y }) => y)], element);
  cards.set(element, card);
  CARD_SIZES.observe(element);
  return element;
}

/** The colour of a token that is so many versions older than the trained one, from fresh to old. */
const AGE_TONES = ["#4a7fb0", "#45a197", "#8fb26a", "#d3b04c", "#d98a45", "#c65f4a", "#a04a6b", "#7a4a86"];
const ageTone = (age) => AGE_TONES[Math.min(age, AGE_TONES.length - 1)];

/** Draw each step's shares of trajectories by age; `younger` are the counts of report_run's `ages`. */
function ageChart([steps, ...younger]) {
  const all = younger.at(-1);
  const bands = younger.map((upto, age) => {
    const own = upto.map((count, i) => count - (age ? younger[age - 1][i] : 0));
    const share = (at) => (at === null ? sum(own) / sum(all) : own[at] / all[at]);
    return {
      label: age === younger.length - 1 ? `${age} or more` : plural(age, "version"), fill: ageTone(age),
      y: sum(own) ? upto.map((count, i) => count / all[i]) : [],
      write: (value) => `${(100 * value).toFixed(0)} %`, value: (at) => `${(100 * share(at)).toFixed(0)} %`,
    };
  });
  return chart("Batches by age of the oldest token", steps, bands);
}

/** Draw a role's seconds as one bar of shares, the largest first; the percentages add up to 100. */
function shares(role, parts, note, words) {
  const total = sum(Object.values(parts)), bar = make("div", { className: "bar" }), list = make("ul");
  const named = Object.entries(parts).filter(([, seconds]) => seconds > 0).sort((a, b) => b[1] - a[1]);
  let before = 0;
  named.forEach(([name, seconds], i) => {
    const upto = before + seconds / total, label = words[name] ?? name, tone = `tone${Math.min(i, 7)}`;
    const share = `${((Math.round(1000 * upto) - Math.round(1000 * before)) / 10).toFixed(1)} %`;
    before = upto;
    bar.append(make("span", { className: tone, style: { flexGrow: seconds },
      title: `${label} ${share} (${duration(seconds)})` }));
    list.append(make("li", {}, make("i", { className: tone }), `${label} `,
      make("b", { dataset: { share } }, share)));
  });
  return make("div", { className: "role", dataset: { role } },
    make("h3", {}, role, make("small", {}, note)), make("div", {}, bar, list));
}
