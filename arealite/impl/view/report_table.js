// The table of trajectories: only the rows in sight are elements, however many there are.

const ROW = 28; // pixels, as in report.css

/** The columns: name, width, value to sort by, and text (or element) to show. */
function columnsOf(table) {
  const { step, oldest_version: oldest, newest_version: newest } = table;
  const version = (row) => (oldest[row] === newest[row] ? `${newest[row]}` : `${oldest[row]}–${newest[row]}`);
  const cut = (row) => (table.truncated[row] ? make("i", { className: "cut", title: "truncated" }, "✂") : null);
  const parts = (row) => Object.entries(table.reward_parts[row]).filter(([, value]) => value) // 0 says little
    .map(([name, value]) => `${name} ${format(value)}`).join("  ");
  const hasParts = table.reward_parts.some((each) => Object.keys(each).length);
  const hasSeats = namesIn(table.seat).length > 1;
  return [
    { name: "step", width: "3.4em", number: true, of: (row) => step[row] ?? Infinity,
      show: (row) => step[row] ?? "–" },
    { name: "trajectory", width: "minmax(5em, 0.7fr)", of: (row) => row,
      show: (row) => (hasSeats ? idOf(table)(row) : idOf(table)(row).replace(/\/[^/]*$/, "")) },
    namesIn(table.source).length > 1 && { name: "environment", width: "minmax(5.5em, 1fr)",
      of: (row) => table.source[row] },
    hasSeats && { name: "seat", width: "minmax(4em, .6fr)",
      of: (row) => table.seat[row] },
    { name: "reward", width: "4.4em", number: true, of: (row) => table.reward[row],
      show: (row) => format(table.reward[row]) },
    hasParts && { name: "parts", width: "minmax(5em, 2fr)", of: parts },
    { name: "tokens", width: "4.2em", number: true, of: (row) => table.num_tokens[row],
      show: (row) => [cut(row), table.num_tokens[row].toLocaleString("en")] },
    { name: "turns", width: "3em", number: true, of: (row) => table.turns[row] },
    { name: "age", width: "2.4em", number: true,
      of: (row) => (step[row] === null ? -1 : step[row] - 1 - oldest[row]),
      show: (row) => (step[row] === null ? "–" : step[row] - 1 - oldest[row]) },
    { name: "versions", width: "4.8em", number: true, of: (row) => oldest[row], show: version },
  ].filter(Boolean);
}

const idOf = (table) => (row) => `${table.group_id[row]}/${table.member[row]}/${table.seat[row]}`;
const namesIn = (column) => [...new Set(column)];

class Grid {
  constructor(table, host, onSelect) {
    Object.assign(this, { table, host, onSelect, selected: -1, sort: null, isDown: false });
    this.columns = columnsOf(table);
    this.rows = table.member.map((_, row) => row);
    this.template = this.columns.map((column) => column.width).join(" ");
    this.head = make("div", { className: "row head", role: "row", style: { gridTemplateColumns: this.template } },
      this.columns.map((column) => make("button", {
        type: "button", className: column.number ? "number" : "", role: "columnheader",
        onclick: () => this.order(column) }, column.name)));
    this.body = make("div", { className: "body" });
    this.scroller = make("div", { className: "scroller", onscroll: () => this.draw() }, this.body);
    host.append(this.head, this.scroller);
    host.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.scroller);
    this.show(this.rows);
  }

  /** Show these rows, in the order that was chosen. */
  show(rows) {
    this.rows = rows;
    if (this.sort) {
      const sign = this.isDown ? -1 : 1, of = this.sort.of;
      const keys = new Map(rows.map((row) => [row, of(row)]));
      this.rows = [...rows].sort((a, b) => {
        const [x, y] = [keys.get(a), keys.get(b)];
        return (x < y ? -sign : x > y ? sign : 0) || a - b;
      });
    }
    this.host.setAttribute("aria-rowcount", String(this.rows.length));
    this.body.style.height = `${this.rows.length * ROW}px`;
    this.drawn = "";
    this.draw();
  }

  /** Sort by a column, the second time the other way round, then no more; null: by none. */
  order(column) {
    const isNumeric = Boolean(column?.number);
    if (this.sort !== column) [this.sort, this.isDown] = [column, isNumeric];
    else if (column && this.isDown === isNumeric) this.isDown = !this.isDown;
    else this.sort = null;
    [...this.head.children].forEach((cell, i) => cell.setAttribute("aria-sort",
      this.columns[i] !== this.sort ? "none" : this.isDown ? "descending" : "ascending"));
    this.show(this.sort ? this.rows : [...this.rows].sort((a, b) => a - b));
  }

  draw() {
    const top = this.scroller.scrollTop, height = this.scroller.clientHeight;
    const first = Math.max(0, Math.floor(top / ROW) - 6);
    const end = Math.min(this.rows.length, Math.ceil((top + height) / ROW) + 6);
    const key = `${first} ${end} ${this.selected}`;
    if (key === this.drawn) return;
    this.drawn = key;
    const made = [];
    for (let i = first; i < end; i++) made.push(this.row(this.rows[i], i));
    this.body.replaceChildren(...made);
  }

  row(row, place) {
    const cells = this.columns.map((column) => make("span", {
      className: `${column.number ? "number" : ""} ${column.name}`, role: "gridcell" },
    (column.show ?? column.of)(row)));
    return make("div", {
      className: `row${row === this.selected ? " selected" : ""}`, role: "row",
      "aria-selected": String(row === this.selected), "data-row": String(row),
      style: { gridTemplateColumns: this.template, top: `${place * ROW}px` },
      onclick: () => this.select(row) }, cells);
  }

  select(row) {
    this.selected = row;
    const place = this.rows.indexOf(row), { scrollTop, clientHeight } = this.scroller;
    if (place >= 0 && place * ROW < scrollTop) this.scroller.scrollTop = place * ROW;
    if ((place + 1) * ROW > scrollTop + clientHeight) {
      this.scroller.scrollTop = (place + 1) * ROW - clientHeight;
    }
    this.draw();
    this.onSelect(row);
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / ROW) - 1);
    const moves = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page,
      Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (!this.rows.length) return;
    const place = this.rows.indexOf(this.selected);
    const wanted = place < 0 ? 0 : place + moves[event.key];
    this.select(this.rows[Math.min(Math.max(wanted, 0), this.rows.length - 1)]);
  }
}

/** The filters above the table: what they ask of a row, and how many rows are left. */
class Filters {
  constructor(run, tokens, form, grid, detail) {
    Object.assign(this, { run, table: run.table, tokens, grid, detail, found: null, number: 0 });
    const range = (name, step) => ["from", "to"].map((end) => make("input", {
      type: "number", step, name: `${name}-${end}`, "aria-label": `${name} ${end}`, placeholder: end }));
    const choice = (name, names) => (names.length > 1 ? make("label", {}, name,
      make("select", { name }, make("option", { value: "" }, "all"),
        names.map((each, i) => make("option", { value: String(i) }, each || "(none)")))) : null);
    this.picks = [["environment", "source"], ["seat", "seat"], ["state", "state"]].map(
      ([name, column]) => ({ name, column: this.table[column], names: namesIn(this.table[column]) }));
    this.count = make("output", { "aria-live": "polite" });
    form.append(...[
      make("input", { type: "search", name: "words", placeholder: "text, trajectory or task",
        "aria-label": "search in text" }),
      make("label", {}, "reward", range("reward", "any")),
      make("label", {}, "step", range("step", "1")),
      ...this.picks.map(({ name, names }) => choice(name, names)),
      make("button", { type: "reset" }, "Clear"), this.count].filter(Boolean));
    this.form = form;
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", (event) => this.change(event.target.name === "words"));
    form.addEventListener("reset", () => setTimeout(() => {
      grid.order(null);
      this.change(true);
    }));
    this.apply();
  }

  value(name) {
    const text = this.form.elements[name]?.value.trim() ?? "";
    return text === "" ? null : text;
  }

  change(hasNewWords) {
    if (hasNewWords) this.search();
    this.apply();
  }

  /** Look for the words in every text; the table fills as they are found. */
  async search() {
    const number = ++this.number, words = this.value("words")?.toLowerCase();
    this.found = words ? new Set() : null;
    this.isSearching = Boolean(words);
    if (!words) return;
    await new Promise((resolve) => setTimeout(resolve, 120)); // more may be typed
    const isOld = () => number !== this.number;
    if (isOld()) return;
    const id = idOf(this.table), mine = this.found;
    let shown = performance.now();
    await this.tokens.search(words, (row, isIn) => {
      const about = () => `${id(row)} ${this.table.task_id[row]}`.toLowerCase().includes(words);
      if (isIn || about()) mine.add(row);
      if (performance.now() - shown > 250) {
        this.apply();
        shown = performance.now();
      }
    }, isOld);
    if (isOld()) return;
    this.isSearching = false;
    this.apply();
  }

  apply() {
    const { table } = this, kept = [];
    const numbers = ["reward-from", "reward-to", "step-from", "step-to"].map((name) => {
      const text = this.value(name);
      return text === null ? null : Number(text);
    });
    const [low, high, begin, end] = numbers;
    const picks = this.picks.map(({ name, names, column }) => [column, names[this.value(name)]])
      .filter(([, wanted]) => wanted !== undefined);
    const isIn = (value, from, to) => (from === null || value >= from) && (to === null || value <= to);
    for (let row = 0; row < table.member.length; row++) {
      const step = table.step[row] ?? NaN; // which is in no range
      if (!isIn(table.reward[row], low, high) || !isIn(step, begin, end)) continue;
      if (picks.some(([column, wanted]) => column[row] !== wanted)) continue;
      if (this.found && !this.found.has(row)) continue;
      kept.push(row);
    }
    this.grid.show(kept);
    if (this.grid.selected >= 0 && !this.isSearching && !kept.includes(this.grid.selected)) {
      this.grid.selected = -1;
      this.detail.blank(kept.length ? "The trajectory that was chosen does not match the filters."
        : "No trajectory matches the filters.");
    }
    const leftOut = this.run.trajectories - this.run.shown;
    const all = kept.length === this.run.shown;
    this.count.textContent = (all ? plural(this.run.shown, "trajectory").replace("ys", "ies")
      : `${kept.length.toLocaleString("en")} of ${this.run.shown.toLocaleString("en")}`)
      + (leftOut ? ` (${leftOut.toLocaleString("en")} left out of this report)` : "")
      + (this.isSearching ? ", searching …" : "");
    this.count.dataset.busy = String(Boolean(this.isSearching));
  }
}
