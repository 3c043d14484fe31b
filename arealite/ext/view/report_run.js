// The sections about the whole run: head, curves, waits, weights, ledger and config.

function drawHead({ metrics, ledger, ...run }) {
  const times = (metrics.time ?? []).toSorted((a, b) => a - b);
  const [begin, end] = times.length ? [times[0], times.at(-1)] : [run.written, run.written];
  const tile = (label, value, more, className = "") => make("div", {},
    make("small", {}, label), make("b", { className }, value), make("small", {}, more));
  const tiles = [tile("steps", count(metrics.step?.at(-1) ?? 0),
    times.length > 1 ? `in ${duration(end - begin)}` : "")];
  for (const [label, name] of [["reward", "reward/mean"], ["held-out", "eval/reward"], ["loss", "train/loss"]]) {
    const values = metrics[name]?.filter(isNumber);
    if (values) tiles.push(tile(label, format(values.at(-1)), `${format(values[0])} at the start`));
  }
  if (ledger) {
    tiles.push(
      tile("trained", count(ledger.trained_trajectories), `trajectories, ${count(ledger.tokens.trained)} tokens`),
      tile("oldest token", plural(ledger.max_staleness, "version"), "when it was trained"),
      ledger.ok ? tile("ledger", "balanced", "nothing lost, nothing repeated", "good")
        : tile("ledger", "OUT OF BALANCE", "see below", "bad"));
  }
  const when = (seconds) => new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ");
  find("#head").replaceChildren(make("h1", {}, run.name),
    make("p", {}, times.length ? `${when(begin)} to ${when(end)} UTC · ` : "",
      `report written ${when(run.written)} UTC by AReaLite ${run.arealite}`),
    make("div", { className: "tiles" }, tiles));
}

function drawCurves(run) {
  const cards = Object.entries(run.labels.charts).map(([title, names]) => [title, Object.entries(names)])
    .filter(([, lines]) => lines.some(([, name]) => run.metrics[name] && !name.startsWith("eval/")))
    .map(([title, lines]) => chart(title, run.metrics.step, lines.map((line) => lineOf(run, ...line))));
  fill("curves", make("div", { className: "cards" }, cards),
    run.stride > 1 ? make("p", {}, `Every ${run.stride}th step is drawn.`) : "");
  return cards.length > 0;
}

const isOpen = (group) => find(`details[data-group="${CSS.escape(group)}"]`)?.open;

/** List every metric by its group. */
function drawAll(run) {
  const names = Object.keys(run.metrics).filter((name) => name !== "step" && name !== "time").sort();
  const groups = Object.entries(Object.groupBy(names, (name) => name.split("/")[0]));
  fill("metrics", ...groups.map(([group, own]) => make("details", { open: isOpen(group), dataset: { group } },
    make("summary", {}, run.labels.groups[group] ?? group, make("small", {}, plural(own.length, "metric"))),
    make("div", { className: "cards small" }, own.map((name) =>
      chart(name, run.metrics.step, [lineOf(run, "", name)], { height: 110 }))))));
  return names.length > 0;
}

function drawWaits(run) {
  const roles = Object.entries(run.waits), { labels } = run;
  fill("waits", ...roles.map(([role, parts]) => shares(role, parts, labels.roles[role], labels.parts)));
  return roles.length > 0;
}

function drawWeights(run) {
  const { metrics, ledger } = run, versions = metrics["publish/version"], cards = [];
  if (versions) {
    const minutes = metrics.time.map((time) => (time - metrics.time[0]) / 60);
    const seconds = [["servers paused", "publish/stall_s"], ["pause", "publish/pause_s"],
      ["load", "publish/load_s"], ["stage", "publish/stage_s"]];
    cards.push(
      chart("Version of the servers over time", minutes, [{ y: versions }], { over: "minute" }),
      chart("Seconds per publish", metrics.step, seconds.map((line) => lineOf(run, ...line))));
  }
  if (ledger?.ages.length) cards.push(ageChart(ledger.ages));
  find("#weights .cards").replaceChildren(...cards.filter(Boolean));
  return cards.length > 0;
}

function drawLedger({ ledger }) {
  if (!ledger) return false;
  const rows = (entries) => make("table", {}, entries.map(([name, values, more]) => make("tr", {},
    make("th", { scope: "row" }, name, more ? make("small", {}, more) : null),
    values.map((value) => make("td", {}, isNumber(value) ? count(value) : value)))));
  const counted = (counts, examples = {}) => {
    const entries = Object.entries(counts).sort((a, b) => b[1] - a[1]);
    return entries.length ? rows(entries.map(([name, value]) => [name, [value], examples[name]])) : "None.";
  };
  const balance = ["offered", "trained", "filtered", "buffered", "in_flight"].map((name, i) =>
    [`${["", "= "][i] ?? "+ "}${name.replace("_", " ")}`, [ledger.groups[name], ledger.tokens[name]]]);
  const guarantees = [["lost", "Lost"], ["repeated", "Repeated"], ["broken", "Guarantees broken"]].map(
    ([name, label]) => make("li", { className: ledger[name].length ? "bad" : "good" },
      `${label}: ${ledger[name].join("; ") || "nothing"}`));
  const facts = ["steps", "checkpoints", "trained_trajectories", "mixed_version_trajectories",
    "interrupted", "weight_versions", "max_staleness"];
  const panels = {
    Balance: [rows([["", ["groups", "tokens"]], ...balance]),
      make("ul", {}, guarantees, [ledger.turns, ...ledger.notes].filter(Boolean).map((note) => make("li", {}, note)))],
    Counts: [rows(facts.map((name) => [name.replaceAll("_", " "), [ledger[name]]]))],
    "Failed episodes, by class": [counted(ledger.failures_by_class, ledger.examples)],
    "Filtered groups, by reason": [counted(ledger.filtered_by_reason)],
  };
  find("#ledger .cards").replaceChildren(...Object.entries(panels).map(([title, content]) =>
    make("div", { className: "card" }, make("h3", {}, title), content)));
  return true;
}

function drawConfig({ configs }) {
  const isNew = find("#config").dataset.shown !== JSON.stringify(configs);
  find("#config").dataset.shown = JSON.stringify(configs);
  if (isNew) fill("config", ...configs.map((config, i) => make("details", { open: configs.length === 1 },
    make("summary", {}, `from step ${config.step}`,
      make("small", {}, i < configs.length - 1 ? `to step ${configs[i + 1].step - 1}` : "")),
    make("pre", {}, config.text))));
  return configs.length > 0;
}
