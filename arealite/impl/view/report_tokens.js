// One trajectory: its turns, each sampled token in the colour of what is looked for.

const ROLE = /\b(system|developer|user|assistant|model|tool|ipython|observation|function)\b/i;
const SHOWN = 20000; // tokens that become elements at once
const MODES = {
  versions: "policy version", advantages: "advantage", differences: "trainer − sampler",
  logprobs: "logprob", none: "none",
};

/** Cut a segment into what was observed, by role where the chat template tells it, and what the
 * policy sampled: blocks of {role, begin, end, lead}; `lead` tokens open a sampled block. */
function blocksOf(known, begin, end) {
  const { ids, mask, pieces, vocabulary } = known;
  const roleAt = (at) => {
    if (!vocabulary.special.has(ids[at])) return null;
    const own = pieces[at].includes("INST") ? ["", "user"] : ROLE.exec(pieces[at]);
    if (own) return pieces[at].startsWith("</") || pieces[at].startsWith("[/") ? null : own[1];
    const after = pieces.slice(at + 1, Math.min(at + 4, end)).join("").trimStart();
    const next = ROLE.exec(after);
    return next && next.index === 0 ? next[1] : null;
  };
  const blocks = [];
  for (let at = begin; at < end; at++) {
    const block = last(blocks), isSampled = mask[at] === 1;
    const role = isSampled ? null : roleAt(at);
    if (!block || block.isSampled !== isSampled || role) {
      const named = role ?? (isSampled ? "policy" : at === begin ? "prompt" : "observed");
      blocks.push({ role: named.toLowerCase(), begin: at, end: at + 1, lead: 0, isSampled });
    } else block.end = at + 1;
  }
  return blocks.filter((block, i) => {
    const next = blocks[i + 1];
    const isLead = /^(assistant|model)$/.test(block.role) && next?.isSampled && block.end - block.begin < 6;
    if (isLead) [next.begin, next.lead] = [block.begin, block.end - block.begin];
    return !isLead;
  });
}

/** Return the tool calls in a text, as models write them: between tags, or as JSON and nothing else. */
function callsIn(text) {
  const tagged = [...text.matchAll(/<tool_call>([\s\S]*?)(?:<\/tool_call>|$)/g)].map((m) => m[1]);
  const bare = text.trim().replace("<|python_tag|>", "").replace(/<\|[^|]*\|>$/, "").trim();
  const bodies = tagged.length ? tagged : /^\{[\s\S]*"name"[\s\S]*\}$/.test(bare) ? [bare] : [];
  return bodies.map((body) => {
    try {
      const call = JSON.parse(body);
      return { name: String(call.name), words: JSON.stringify(call.arguments ?? call.parameters ?? {}) };
    } catch {
      return { name: "what cannot be read:", words: body.trim(), isBad: true };
    }
  });
}

/** Return how tokens are coloured: of a value its colour, and what stands in the legend. */
function scaleOf(mode, known, step) {
  const values = Array.from(known[mode] ?? []).filter(isNumber);
  if (mode === "none" || !values.length) {
    return { colour: () => "", legend: [mode === "none" ? "" : "Not kept for this trajectory."] };
  }
  if (mode === "versions") {
    const trained = step === null ? values.reduce((a, b) => Math.max(a, b)) : step - 1, counts = new Map();
    for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
    const colour = (value) =>
      `color-mix(in srgb, ${ageTone(Math.max(0, trained - value))} 45%, transparent)`;
    const chips = [...counts].sort((a, b) => a[0] - b[0]).map(([version, count]) =>
      make("span", { className: "chip", style: { backgroundColor: colour(version) } },
        `version ${version}: ${plural(count, "token")}`));
    return { colour, legend: [...chips, step === null ? "" : `trained at step ${step}`] };
  }
  const most = values.reduce((peak, value) => Math.max(peak, Math.abs(value)), 0);
  const scale = mode === "logprobs" ? Math.max(most, 1) : most || 1;
  const colour = (value) => {
    const share = Math.min(1, Math.abs(value) / scale);
    return `hsl(${value > 0 ? 208 : mode === "logprobs" ? 275 : 16} 72% 52% / ${0.62 * share ** 0.7})`;
  };
  const ends = { logprobs: ["unlikely", "certain"], advantages: ["worse", "better"],
    differences: ["trainer: less likely", "more likely"] }[mode];
  const [low, high] = [-scale, mode === "logprobs" ? 0 : scale];
  const ramp = make("span", { className: "ramp" }, Array.from({ length: 24 }, (_, i) =>
    make("i", { style: { backgroundColor: colour(low + (i / 23) * (high - low)) } })));
  return { colour, legend: [`${ends[0]} ${format(low)}`, ramp, `${format(high)} ${ends[1]}`] };
}

class Detail {
  constructor(run, tokens, host, onPick) {
    Object.assign(this, { run, table: run.table, tokens, host, onPick, mode: "versions", number: 0 });
    this.tip = byId("tip");
    host.addEventListener("pointerover", (event) => this.point(event));
    host.addEventListener("pointerout", () => (this.tip.hidden = true));
    this.blank();
  }

  /** Show no trajectory; `why` says why none is shown any more. */
  blank(why = "") {
    this.number++; // a trajectory that is still read is not shown
    delete this.host.dataset.row;
    const next = "Choose a trajectory: click one, or walk with ↑ ↓ or k j.";
    this.host.replaceChildren(make("p", { className: "hint" },
      why || (this.run.shown ? next : "There are no trajectories.")));
  }

  async show(row) {
    const number = ++this.number;
    const known = await this.tokens.of(row);
    if (number !== this.number) return;
    Object.assign(this, { row, known, step: this.table.step[row], shown: SHOWN });
    this.draw();
    this.host.scrollTop = 0;
  }

  draw() {
    this.spans = [];
    this.legend = make("p", { className: "legend" });
    this.modes = make("div", { className: "modes", role: "group", "aria-label": "colour by" }, "Colour",
      Object.entries(MODES).map(([mode, label]) => make("button", {
        type: "button", "data-mode": mode, onclick: () => this.paint(mode) }, label)));
    this.host.replaceChildren(this.about(), this.group(), this.modes, this.legend, ...this.segments());
    this.host.dataset.row = String(this.row);
    this.paint(this.mode);
  }

  about() {
    const { table, row, step } = this;
    const oldest = table.oldest_version[row], newest = table.newest_version[row];
    const facts = [
      step === null ? "not in a batch" : `step ${step}`, `task ${table.task_id[row]}`,
      table.source[row], `seat ${table.seat[row]}`,
      `${table.trained_tokens[row].toLocaleString("en")} of ${plural(table.num_tokens[row], "token")} sampled`,
      plural(table.turns[row], "turn"), oldest === newest ? `version ${oldest}` : `versions ${oldest} to ${newest}`,
      table.interruptions[row] ? plural(table.interruptions[row], "interruption") : "",
      table.truncated[row] ? "truncated" : "", duration(table.seconds[row]),
      `${table.state[row]}${table.reason[row] ? `: ${table.reason[row]}` : ""}`,
    ].filter(Boolean);
    return make("header", {}, make("h3", {}, idOf(table)(row)),
      make("p", { className: "reward" }, "reward ", make("b", {}, format(table.reward[row])),
        Object.entries(table.reward_parts[row]).map(([name, value]) =>
          make("span", { className: "chip" }, `${name} `, make("b", {}, format(value))))),
      make("p", { className: "facts" }, facts.map((fact) => make("span", {}, fact))));
  }

  /** The other trajectories of the group, with their rewards: what the advantage compares with. */
  group() {
    const { table, row } = this, own = [];
    for (let other = 0; other < table.member.length; other++) {
      if (table.group_id[other] === table.group_id[row]) own.push(other);
    }
    return make("p", { className: "group" }, "Group ", own.map((other) => make("button", {
      type: "button", className: other === row ? "chip chosen" : "chip", title: idOf(table)(other),
      onclick: () => this.onPick(other) }, format(table.reward[other]))));
  }

  segments() {
    const { known } = this, made = [];
    let begin = 0, turn = 0, left = this.shown;
    known.segments.forEach((length, index) => {
      if (known.segments.length > 1) {
        made.push(make("h4", {}, `Segment ${index + 1} of ${known.segments.length}`));
      }
      for (const block of left > 0 ? blocksOf(known, begin, begin + length) : []) {
        if (left <= 0) break;
        if (block.isSampled) turn++;
        block.end = Math.min(block.end, block.begin + left);
        left -= block.end - block.begin;
        made.push(this.block(block, turn));
      }
      begin += length;
    });
    const hidden = known.ids.length - this.shown;
    if (hidden > 0) {
      made.push(make("button", { type: "button", onclick: () => {
        this.shown = Infinity;
        this.draw();
      } }, `Show ${plural(hidden, "more token")}`));
    }
    return made;
  }

  block(block, turn) {
    const { known } = this, words = make("div", { className: "words" });
    for (let at = block.begin; at < block.end; at++) {
      const text = known.pieces[at], isSampled = block.isSampled && at >= block.begin + block.lead;
      const kinds = ["token", isSampled ? "sampled" : "", text === "" ? "partial" : "",
        text.includes("\n") ? "newline" : "", known.vocabulary.special.has(known.ids[at]) ? "special" : ""];
      const span = make("span", { className: kinds.filter(Boolean).join(" "), "data-at": String(at) }, text);
      const reward = known.rewards.get(at);
      if (reward !== undefined) span.dataset.reward = `${reward > 0 ? "+" : ""}${format(reward)}`;
      if (isSampled) this.spans.push([at, span]);
      words.append(span);
    }
    words.dir = "auto"; // not before: each span would look through all of them for a letter
    const text = known.pieces.slice(block.begin, block.end).join("");
    const calls = block.isSampled ? callsIn(text) : [];
    const role = !block.isSampled && text.includes("<tool_response>") ? "tool" : block.role;
    return make("section", { className: `block ${block.isSampled ? "policy" : "observed"}`, "data-role": role },
      make("h5", {}, block.isSampled ? `policy, turn ${turn}` : role,
        make("small", {}, plural(block.end - block.begin, "token")),
        calls.map((call) => make("span", { className: call.isBad ? "call bad" : "call" },
          make("b", {}, call.name), ` ${call.words}`))), words);
  }

  paint(mode) {
    this.mode = mode;
    const { colour, legend } = scaleOf(mode, this.known, this.step);
    for (const [at, span] of this.spans) {
      const value = this.known[mode]?.[at];
      span.style.backgroundColor = isNumber(value) ? colour(value) : "";
    }
    this.legend.replaceChildren(...legend.filter(Boolean));
    for (const button of this.modes.querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
    }
  }

  /** Say everything about the token under the pointer. */
  point(event) {
    const at = Number(event.target.dataset?.at ?? NaN), { known } = this;
    if (!Number.isInteger(at) || !known) return;
    const lines = [["token", JSON.stringify(known.pieces[at])], ["id", String(known.ids[at])]];
    if (known.pieces[at] === "") lines[0][1] = "part of a character";
    if (known.mask[at]) {
      const logprob = known.logprobs[at];
      lines.push(["version", format(known.versions[at])],
        ["logprob", `${format(logprob)} (${(100 * Math.exp(logprob)).toPrecision(3)} %)`],
        ["advantage", format(known.advantages[at])],
        ["trainer − sampler", format(known.differences[at])]);
    } else lines.push(["observed", "not sampled by the policy"]);
    if (known.rewards.has(at)) lines.push(["reward here", format(known.rewards.get(at))]);
    this.tip.replaceChildren(...lines.map(([name, value]) =>
      make("div", {}, make("span", {}, name), make("b", {}, value))));
    this.tip.hidden = false;
    const box = event.target.getBoundingClientRect(), { offsetWidth, offsetHeight } = this.tip;
    const isAbove = box.bottom + offsetHeight + 10 > innerHeight;
    this.tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - offsetWidth - 8))}px`;
    this.tip.style.top = `${isAbove ? Math.max(4, box.top - offsetHeight - 6) : box.bottom + 6}px`;
  }
}
