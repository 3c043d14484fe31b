// The run as a whole: its head, curves, waits, weights, ledger and config.

const LABELS = {
  reward: "Reward", eval: "Held-out", staleness: "Staleness", throughput: "Throughput",
  mismatch: "Trainer and sampler", policy: "Policy", loss: "Loss", update: "Updates",
  length: "Lengths", episode: "Episodes", rollout: "Rollout workers", datapipe: "Datapipe",
  publish: "Publishing weights", time: "Seconds at work", wait: "Seconds waiting", train: "Training",
};

/** What is looked at first: title, and lines of [label, metric]; lines that a run lacks are left out,
 * and evaluations alone make no card. */
const MAIN = [
  ["Reward", [["train", "reward/mean"], ["held-out", "eval/reward"]]],
  ["Loss", [["train", "train/loss"], ["held-out", "eval/loss"]]],
  ["Accuracy", [["train", "train/accuracy"], ["held-out", "eval/accuracy"]]],
  ["Staleness, versions", [["mean", "staleness/mean"], ["max", "staleness/max"]]],
  ["Tokens a second", [["trained", "throughput/trained_tokens_per_s"],
    ["generated", "throughput/generated_tokens_per_s"]]],
  ["Trainer and sampler, mean |Δ logprob|", [["all", "mismatch/logprob_abs_diff_mean"],
    ["same version", "mismatch/logprob_abs_diff_mean_current"]]],
  ["Entropy of the policy", [["entropy", "policy/entropy"]]],
  ["Gradient norm", [["norm", "update/grad_norm"]]],
  ["Sampled tokens a trajectory", [["mean", "length/trained_mean"], ["max", "length/trained_max"]]],
  ["Seconds a step", [["step", "time/step_s"], ["waiting for the batch", "wait/batch_s"]]],
  ["Truncated episodes, share", [["truncated", "episode/truncated_frac"]]],
];

const SECONDS = /^(?!.*_per_s$).*(_s|\/seconds_\w+)$|\/wait\//; // metrics that are seconds

function seriesOf(run, label, name) {
  const points = !run.metrics[name], from = points ? run.evals : run.metrics;
  return { label, x: from.step ?? [], y: from[name], points, told: run.told[name] ?? "",
    write: SECONDS.test(name) ? duration : format };
}

const firstOf = (values) => values?.find(isNumber);
const lastOf = (values) => values?.findLast(isNumber);

function drawHead(run) {
  const { metrics, evals, ledger } = run;
  const times = [...(evals.time ?? []), ...(metrics.time ?? [])];
  const [begin, end] = times.length ? bounds([times]) : [run.written, run.written];
  const tiles = [];
  const tile = (label, value, more) => tiles.push(make("div", { className: "tile" },
    make("span", {}, label), make("b", {}, value), make("small", {}, more ?? "")));
  const change = (values) => `${format(firstOf(values))} at the start`;
  const steps = metrics.step ?? [];
  tile("steps", steps.length ? last(steps).toLocaleString("en") : "0",
    times.length > 1 ? `in ${duration(end - begin)}` : "");
  for (const [label, values] of [["reward", metrics["reward/mean"]],
    ["held-out", evals["eval/reward"]], ["loss", metrics["train/loss"]]]) {
    if (values) tile(label, format(lastOf(values)), change(values));
  }
  if (ledger) {
    tile("trained", ledger.trained_trajectories.toLocaleString("en"),
      `trajectories, ${ledger.tokens.trained.toLocaleString("en")} tokens`);
    tile("oldest token", plural(ledger.max_staleness, "version"), "when it was trained");
    tile("ledger", ledger.ok ? "balanced" : "OUT OF BALANCE",
      ledger.ok ? "nothing lost, nothing repeated" : "see below");
    last(tiles).classList.add(ledger.ok ? "good" : "bad");
  }
  const when = (seconds) => new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ");
  byId("head").append(
    make("h1", {}, run.name),
    make("p", {}, times.length ? `${when(begin)} to ${when(end)} UTC · ` : "",
      `report written ${when(run.written)} UTC by AReaLite ${run.arealite}`),
    make("div", { className: "tiles" }, tiles));
}

function drawCurves(run) {
  const cards = MAIN.filter(([, lines]) => lines.some(([, name]) => run.metrics[name]))
    .map(([title, lines]) => chart({ title, series: lines.map((line) => seriesOf(run, ...line)) }))
    .filter(Boolean);
  byId("main-curves").append(...cards);
  if (run.stride > 1) {
    byId("curves").append(make("p", {}, `Every ${run.stride}th step is drawn.`));
  }
  return cards.length > 0;
}

/** List every metric by its group; a group's curves are drawn when it is opened. */
function drawAll(run) {
  const names = [...new Set([...Object.keys(run.metrics), ...Object.keys(run.evals)])];
  const groups = new Map();
  for (const name of names.filter((each) => each !== "step" && each !== "time").sort()) {
    const group = name.split("/")[0];
    groups.set(group, [...(groups.get(group) ?? []), name]);
  }
  for (const [group, own] of groups) {
    const cards = make("div", { className: "cards small" });
    const open = () => {
      if (cards.childElementCount) return;
      cards.append(...own.map((name) => chart({ title: name, series: [seriesOf(run, "", name)] }))
        .filter(Boolean));
    };
    byId("all-curves").append(make("details", { ontoggle: open },
      make("summary", {}, LABELS[group] ?? group, make("small", {}, plural(own.length, "metric"))),
      cards));
  }
  return groups.size > 0;
}

const ROLES = {
  trainer: "seconds of rank 0, step by step",
  episodes: "seconds of all trained episodes",
  workers: "seconds of all rollout workers",
  datapipe: "what the next batch waited for",
  servers: "while the run trained",
};

const PARTS = { // in the words of a reader; the others say it themselves
  full: "every slot taken", "lease wait": "waiting for a lease", "groups wait": "waiting for groups",
  "pace wait": "held back for slow episodes", "trainer works": "none: the trainer is at work",
  "generate or idle": "generating, or idle", "weights wait": "standing still for weights",
};

function drawWaits(run) {
  const roles = Object.entries(run.waits);
  byId("wait-bars").append(...roles.map(([role, parts]) => shares(role, parts, ROLES[role], PARTS)));
  return roles.length > 0;
}

const AGES = 7; // and what is older in one band

function drawWeights(run) {
  const { metrics, ledger } = run;
  const versions = metrics["publish/version"];
  const cards = [];
  if (versions) {
    const minutes = metrics.time.map((time) => (time - metrics.time[0]) / 60);
    const line = { label: "version", x: minutes, y: versions };
    cards.push(chart({ title: "Version of the servers over time", series: [line], over: "minute" }));
    cards.push(chart({
      title: "Seconds of a publish", zero: true,
      series: [["servers stand still", "stall_s"], ["pause", "pause_s"], ["load", "load_s"],
        ["stage", "stage_s"]].map(([label, name]) => seriesOf(run, label, `publish/${name}`)),
    }));
  }
  if (ledger?.ages.length) {
    const steps = [...new Set(ledger.ages.map(([step]) => step))];
    const at = new Map(steps.map((step, i) => [step, i]));
    const oldest = Math.min(AGES, ledger.ages.reduce((most, [, age]) => Math.max(most, age), 0));
    const bands = [];
    for (let age = 0; age <= oldest; age++) {
      const label = age === AGES ? `${age} or more` : `${age} ${age === 1 ? "version" : "versions"}`;
      bands.push({ label, tone: ageTone(age), y: steps.map(() => 0) });
    }
    for (const [step, age, count] of ledger.ages) {
      bands[Math.min(Math.max(age, 0), oldest)].y[at.get(step)] += count;
    }
    const title = "Batches by age of the oldest token";
    cards.push(stack({ title, x: steps, bands }));
  }
  byId("weight-charts").append(...cards.filter(Boolean));
  return cards.length > 0;
}

/** The colour of what is so many versions older than what was trained, from fresh to old. */
const AGE_TONES = ["#4a7fb0", "#45a197", "#8fb26a", "#d3b04c", "#d98a45", "#c65f4a", "#a04a6b", "#7a4a86"];
const ageTone = (age) => AGE_TONES[Math.min(age, AGE_TONES.length - 1)];

function countTable(counts, examples = {}) {
  const entries = Object.entries(counts).sort((a, b) => b[1] - a[1]);
  const most = Math.max(...entries.map(([, count]) => count));
  return make("table", { className: "counts" }, entries.map(([name, count]) => make("tr", {},
    make("th", {}, name), make("td", { className: "number" }, count.toLocaleString("en")),
    make("td", {}, make("div", { className: "meter", style: { width: `${(100 * count) / most}%` } }),
      examples[name] ? make("small", {}, examples[name]) : null))));
}

function drawLedger({ ledger }) {
  if (!ledger) return false;
  const row = (label, name, sign) => make("tr", {}, make("th", {}, `${sign} ${label}`),
    ...[ledger.groups, ledger.tokens].map((balance) =>
      make("td", { className: "number" }, balance[name].toLocaleString("en"))));
  const kinds = [["lost", "Lost"], ["repeated", "Repeated"], ["broken", "Promises broken"]];
  const promises = kinds.map(([name, label]) => make("li", {
    className: ledger[name].length ? "bad" : "good" }, `${label}: `,
    ledger[name].length ? ledger[name].join("; ") : "nothing"));
  const facts = ["steps", "checkpoints", "trained_trajectories", "mixed_version_trajectories",
    "interrupted", "weight_versions", "max_staleness"];
  const panel = (title, ...content) => make("div", { className: "panel" }, make("h3", {}, title), content);
  const failed = ledger.failures_by_class, filtered = ledger.filtered_by_reason;
  byId("balance").append(
    panel("Balance", make("table", {}, make("tr", {}, make("th"), make("th", {}, "groups"),
      make("th", {}, "tokens")), row("offered", "offered", ""), row("trained", "trained", "="),
    row("filtered", "filtered", "+"), row("buffered", "buffered", "+"),
    row("in flight", "in_flight", "+")),
    make("ul", { className: "promises" }, promises, ledger.notes.map((note) => make("li", {}, note)))),
    panel("Counts", make("table", {}, facts.map((name) => make("tr", {},
      make("th", {}, name.replaceAll("_", " ")),
      make("td", { className: "number" }, ledger[name].toLocaleString("en")))))),
    panel("Failed episodes, by class", Object.keys(failed).length
      ? countTable(failed, ledger.examples) : make("p", {}, "None.")),
    panel("Filtered groups, by reason", Object.keys(filtered).length
      ? countTable(filtered) : make("p", {}, "None.")));
  return true;
}

function drawConfig({ configs }) {
  byId("configs").append(...configs.map((config, i) => make("details", { open: configs.length === 1 },
    make("summary", {}, `from step ${config.step}`,
      make("small", {}, i < configs.length - 1 ? `to step ${configs[i + 1].step - 1}` : "")),
    make("pre", {}, config.text))));
  return configs.length > 0;
}
