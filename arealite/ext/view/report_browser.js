// The table of trajectories with its filters, and the start of the page.

const ROW = 28; // pixels: the height of a row in report.css, which the head has, too
const MARGIN = 8; // rows drawn above and below those in sight
const TYPED = "input:not([type=radio]), select"; // elements that handle keys themselves

/** Return the columns: `of` gives a row's value to sort by, `show` its text. */
function columnsOf(table) {
  const { step, oldest_version: oldest, newest_version: newest, trajectory_id: ids } = table;
  const [hasSources, hasSeats] = ["source", "seat"].map((name) => new Set(table[name]).size > 1);
  const parts = (row) => Object.entries(table.reward_parts[row]).filter(([, value]) => value) // 0 says little
    .map(([name, value]) => `${name} ${format(value)}`).join("  ");
  const number = (name, width, of) => ({ name, width, isNumber: true, of, show: (row) => format(of(row)) });
  return [
    number("step", "4em", (row) => step[row]),
    { name: "trajectory", of: (row) => row,
      show: (row) => (hasSeats ? ids[row] : ids[row].replace(/\/[^/]*$/, "")) },
    hasSources && { name: "environment", of: (row) => table.source[row] },
    hasSeats && { name: "seat", of: (row) => table.seat[row] },
    number("reward", "5em", (row) => table.reward[row]),
    table.reward_parts.some((each) => Object.keys(each).length) && { name: "parts", of: parts },
    { ...number("tokens", "5em", (row) => table.num_tokens[row]),
      show: (row) => `${table.truncated[row] ? "✂ " : ""}${count(table.num_tokens[row])}` },
    number("turns", "4.2em", (row) => table.turns[row]),
    number("age", "3.4em", (row) => (step[row] === null ? null : step[row] - 1 - oldest[row])),
    { ...number("versions", "5.8em", (row) => oldest[row]),
      show: (row) => (oldest[row] === newest[row] ? oldest[row] : `${oldest[row]}–${newest[row]}`) },
  ].filter(Boolean).map((column) => ({ show: column.of, ...column }));
}

let browser = null;

class Browser {
  constructor(run, version) {
    Object.assign(this, { selected: -1, sort: null, isDown: false, rows: [] });
    Object.assign(this, { found: null, searches: 0, isSearching: false });
    [this.form, this.grid] = [find("#filters"), find("#grid")];
    this.detail = new Detail((row) => this.select(row));
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", (event) => this.change(event.target.name === "words"));
    this.form.addEventListener("reset", () => setTimeout(() => {
      this.sort = null;
      this.change(true);
    }));
    this.grid.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.grid);
    document.addEventListener("keydown", (event) => this.key(event));
    this.use(run, version);
  }

  /** Show a run, or its next version: filters, order and the chosen trajectory stay. */
  use(run, version) {
    const { table } = run, chosen = this.table?.trajectory_id[this.selected];
    this.tokens = new Tokens(table, version, this.tokens?.texts);
    Object.assign(this, { run, table, columns: columnsOf(table), selected: table.trajectory_id.indexOf(chosen) });
    this.sort = this.columns.find(({ name }) => name === this.sort?.name) ?? null;
    this.heads = this.columns.map((column) => make("th", {
      scope: "col", className: column.isNumber ? "number" : "", style: { width: column.width } },
      make("button", { type: "button", onclick: () => this.order(column) }, column.name)));
    find("#grid thead tr").replaceChildren(...this.heads);
    for (const name of ["source", "seat", "state"]) {
      const select = this.form.elements[name], values = [...new Set(table[name])], { value } = select;
      select.replaceChildren(select[0], ...values.map((value) => new Option(value || "(none)", `=${value}`)));
      select.value = value;
      select.parentElement.hidden = values.length < 2;
    }
    this.detail.use(run, this.tokens, this.selected);
    this.search(this.found).catch(fail);
    this.update();
  }

  /** Search for new words, then filter and sort the rows again. */
  change(hasNewWords) {
    if (hasNewWords) this.search().catch(fail);
    this.update();
  }

  /** Search all texts for the words; the table fills as rows are found. */
  async search(before = null) {
    const search = ++this.searches, words = this.form.elements.words.value.trim().toLowerCase();
    const isOld = () => search !== this.searches, found = words ? before ?? new Set() : null;
    Object.assign(this, { found, isSearching: words !== "" });
    if (!words) return;
    await new Promise((resolve) => setTimeout(resolve, 120)); // wait for further typing
    if (isOld()) return;
    let shown = performance.now();
    await this.tokens.search((row, text) => {
      const about = () => `${this.table.trajectory_id[row]} ${this.table.task_id[row]}`.toLowerCase();
      if (text.includes(words) || about().includes(words)) found.add(this.table.trajectory_id[row]);
      if (performance.now() - shown > 250) {
        this.update();
        shown = performance.now();
      }
    }, isOld);
    if (isOld()) return;
    this.isSearching = false;
    this.update();
  }

  /** Return the rows that pass all filters. */
  filtered() {
    const { table, found } = this, asked = Object.fromEntries(new FormData(this.form));
    const isIn = (value, name) => [[`${name}-from`, 1], [`${name}-to`, -1]].every(([end, sign]) =>
      asked[end] === "" || (value !== null && sign * (value - Number(asked[end])) >= 0));
    const isPicked = (row, name) => !asked[name] || asked[name] === `=${table[name][row]}`;
    return [...table.reward.keys()].filter((row) => isIn(table.reward[row], "reward")
      && isIn(table.step[row], "step") && (!found || found.has(table.trajectory_id[row]))
      && ["source", "seat", "state"].every((name) => isPicked(row, name)));
  }

  update() {
    const { run, sort } = this, { length } = this.rows = this.filtered();
    const sign = this.isDown ? -1 : 1, keys = new Map(sort && this.rows.map((row) => [row, sort.of(row)]));
    const compare = (x, y) => (x < y ? -sign : x > y ? sign : 0);
    if (sort) this.rows.sort((a, b) => compare(keys.get(a), keys.get(b)) || a - b);
    this.heads.forEach((head, i) => (head.ariaSort =
      this.columns[i] !== sort ? "none" : this.isDown ? "descending" : "ascending"));
    find("#grid table").ariaRowCount = length;
    if (this.selected >= 0 && !this.isSearching && !this.rows.includes(this.selected)) {
      this.selected = -1;
      this.detail.blank(length ? "The chosen trajectory does not match the filters."
        : "No trajectory matches the filters.");
    }
    const leftOut = run.trajectories - run.shown;
    const output = find("#count");
    output.textContent = (length === run.shown ? plural(length, "trajectory", "trajectories")
      : `${count(length)} of ${count(run.shown)}`)
      + (leftOut ? ` (${count(leftOut)} left out of this report)` : "")
      + (this.isSearching ? ", searching …" : "");
    output.dataset.busy = this.isSearching;
    this.draw();
  }

  /** Sort by a column, the second time in the other direction, then by none. */
  order(column) {
    const isNumber = Boolean(column.isNumber);
    if (this.sort !== column) Object.assign(this, { sort: column, isDown: isNumber });
    else if (this.isDown === isNumber) this.isDown = !isNumber;
    else this.sort = null;
    this.update();
  }

  /** Make elements of the rows in sight, however many rows there are. */
  draw() {
    const { scrollTop, clientHeight } = this.grid;
    const first = Math.max(0, Math.floor(scrollTop / ROW) - MARGIN);
    const drawn = this.rows.slice(first, first + Math.ceil(clientHeight / ROW) + 2 * MARGIN);
    const gap = (rows) => make("tr", { style: { height: `${rows * ROW}px` } });
    find("#grid tbody").replaceChildren(gap(first), ...drawn.map((row) => make("tr", {
      ariaSelected: row === this.selected, dataset: { row }, onclick: () => this.select(row) },
      this.columns.map((column) => make("td", {
        className: `${column.name} ${column.isNumber ? "number" : ""}` }, column.show(row)))),
    ), gap(this.rows.length - first - drawn.length));
  }

  select(row) {
    this.selected = row;
    const top = this.rows.indexOf(row) * ROW, bottom = top + 2 * ROW - this.grid.clientHeight;
    if (top >= 0) this.grid.scrollTop = Math.min(top, Math.max(this.grid.scrollTop, bottom));
    this.draw();
    this.detail.show(row).catch(fail);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest(TYPED)) return;
    const page = Math.max(1, Math.floor(this.grid.clientHeight / ROW) - 2);
    const anywhere = { j: 1, k: -1 }, inGrid = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page,
      Home: -Infinity, End: Infinity };
    const move = anywhere[event.key] ?? (this.grid.contains(event.target) ? inGrid[event.key] : undefined);
    if (event.key === "/") this.form.elements.words.focus();
    else if (move === undefined) return;
    event.preventDefault();
    if (!move || !this.rows.length) return;
    const place = this.rows.indexOf(this.selected), wanted = place < 0 ? 0 : place + move;
    this.select(this.rows[Math.min(Math.max(wanted, 0), this.rows.length - 1)]);
  }
}

function fail(error) {
  find("#head").append(make("p", { className: "bad" }, `This report cannot be shown whole: ${error}`));
  throw error;
}

/** Draw all sections. A section without content is hidden, and has no link. */
function draw(run, version) {
  drawHead(run);
  const sections = { curves: drawCurves, waits: drawWaits, weights: drawWeights,
    trajectories: () => run.table !== null, ledger: drawLedger, metrics: drawAll, config: drawConfig };
  for (const [name, drawSection] of Object.entries(sections)) {
    document.getElementById(name).hidden = !drawSection(run);
  }
  find("#nav").replaceChildren(...[...document.querySelectorAll("section[id]:not([hidden])")].map((section) =>
    make("a", { href: `#${section.id}` }, section.firstElementChild.textContent)));
  if (run.table && browser) browser.use(run, version);
  else if (run.table) browser = new Browser(run, version);
  document.documentElement.dataset.ready = "true";
}

/** Draw the data of a live page whenever the server sends new ones. */
async function follow() {
  for (let version = ""; ;) {
    const answer = await ask("run", version).then((reply) => (reply.ok ? reply.json() : null)).catch(() => null);
    const state = answer?.state ?? [["no answer", "The run has ended, or its page is not served any more."]];
    find("#state").replaceChildren(...state.map(([label, text]) => make("span", {}, make("small", {}, label), ` ${text}`)));
    if (answer?.about) draw(answer.about, version = answer.version);
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

async function start() {
  const run = await readJson("about");
  if (run.live) return follow();
  draw(run);
  const { unreadable } = await readJson("end");
  if (unreadable) {
    find("#filters").after(make("p", { className: "bad" }, `${plural(unreadable, "payload")} could `
      + "not be read: those tokens are left blank. `arealite audit` says more."));
  }
}

start().catch(fail);
