// One trajectory: its turns, and each sampled token in the colour of the chosen value.

const ROLE = /\b(system|developer|user|assistant|model|tool|ipython|observation|function)\b/i;
const SHOWN = 20000; // tokens that become elements at once

/** Return the role whose message begins at `at` with a special token of the chat template, or null. */
function roleAt({ isSpecial, pieces }, at) {
  if (!isSpecial(at)) return null;
  const own = pieces[at].includes("INST") ? ["", "user"] : ROLE.exec(pieces[at]);
  if (own) return /^(<\/|\[\/)/.test(pieces[at]) ? null : own[1].toLowerCase();
  const next = ROLE.exec(pieces.slice(at + 1, at + 4).join("").trimStart());
  return next?.index === 0 ? next[1].toLowerCase() : null;
}

/** Cut a segment into observed blocks, by role, and blocks that the policy sampled. The `lead` first
 * tokens of a sampled block are the template's, and were not sampled. */
function blocksOf(known, begin, end) {
  const blocks = [];
  for (let at = begin; at < end; at++) {
    const block = blocks.at(-1), isSampled = known.mask[at] === 1;
    const role = isSampled ? null : roleAt(known, at);
    if (block?.isSampled === isSampled && !role) block.end = at + 1;
    else {
      const other = isSampled ? "policy" : at === begin ? "prompt" : "observed";
      blocks.push({ role: role ?? other, begin: at, end: at + 1, lead: 0, isSampled });
    }
  }
  return blocks.filter(({ role, ...block }, i) => {
    const next = blocks[i + 1], length = block.end - block.begin;
    const isLead = /^(assistant|model)$/.test(role) && next?.isSampled && length < 6;
    if (isLead) Object.assign(next, { begin: block.begin, lead: length });
    return !isLead;
  });
}

/** Return the tool calls in a text: between tags, or a text that is one JSON object. */
function callsIn(text) {
  const tagged = [...text.matchAll(/<tool_call>([\s\S]*?)(?:<\/tool_call>|$)/g)].map((match) => match[1]);
  const bare = text.trim().replace("<|python_tag|>", "").replace(/<\|[^|]*\|>$/, "").trim();
  const bodies = tagged.length ? tagged : /^\{[\s\S]*"name"[\s\S]*\}$/.test(bare) ? [bare] : [];
  return bodies.map((body) => {
    try {
      const call = JSON.parse(body), given = JSON.stringify(call.arguments ?? call.parameters ?? {});
      return make("span", { className: "call" }, make("b", {}, String(call.name)), ` ${given}`);
    } catch {
      return make("span", { className: "call bad" }, `malformed call: ${body.trim()}`);
    }
  });
}

/** Return the colour of a value, and the legend, for a mode of colouring. */
function scaleOf(mode, known, step) {
  const values = [...known[mode] ?? []].filter((value, at) => known.mask[at] && isNumber(value));
  if (!values.length) {
    return { colour: () => "", legend: [mode === "none" ? "" : "Not kept for this trajectory."] };
  }
  const chip = (text, background) => make("span", { className: "chip", style: { background } }, text);
  const peak = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  if (mode === "versions") {
    const trained = step === null ? peak : step - 1, counts = new Map();
    for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
    const colour = (value) => `color-mix(in srgb, ${ageTone(Math.max(0, trained - value))} 45%, transparent)`;
    const chips = [...counts].sort((a, b) => a[0] - b[0]).map(([version, tokens]) =>
      chip(`version ${version}: ${plural(tokens, "token")}`, colour(version)));
    return { colour, legend: [...chips, step === null ? "" : `trained at step ${step}`] };
  }
  const isLogprob = mode === "logprobs", scale = isLogprob ? Math.max(peak, 1) : peak || 1;
  const colour = (value) => {
    const alpha = 0.62 * Math.min(1, Math.abs(value) / scale) ** 0.7;
    return `hsl(${value > 0 ? 208 : isLogprob ? 275 : 16} 72% 52% / ${alpha})`;
  };
  const [low, high] = { logprobs: ["unlikely", "certain"], advantages: ["worse", "better"],
    differences: ["trainer: less likely", "more likely"] }[mode];
  const top = isLogprob ? 0 : scale;
  const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => colour(-scale + share * (top + scale)));
  return { colour, legend: [`${low} ${format(-scale)}`,
    chip("\u00a0".repeat(20), `linear-gradient(to right, ${stops})`), `${format(top)} ${high}`] };
}

/** Return why a segment began, and how it differs from an earlier segment; "" for the first one. */
function originOf({ ids, segments, turns }, index, begin) {
  const [start, , reason] = turns[index]?.[0] ?? [];
  if (!reason || reason === "first") return "";
  let best = 0, from = 0, whole = 0, other = 0;
  segments.forEach((length, number) => {
    const [at, , why] = turns[number][0], most = Math.min(length, segments[index]);
    const isEarlier = why === "first" || at < start || (at === start && number < index);
    let same = 0;
    while (isEarlier && same < most && ids[other + same] === ids[begin + same]) same++;
    if (same > best) [best, from, whole] = [same, number + 1, length];
    other += length;
  });
  const how = best === segments[index] ? "repeats" : best === whole ? "continues" : "leaves";
  const after = how === "leaves" ? ` after ${plural(best, "token")}` : "";
  return from ? `: ${reason}, ${how} segment ${from}${after}` : `: ${reason}`;
}

class Detail {
  constructor(onPick) {
    Object.assign(this, { onPick, calls: 0, host: find("#detail") });
    find("#colour").addEventListener("change", () => this.paint());
    this.host.addEventListener("pointerover", (event) => this.point(event));
    this.host.addEventListener("pointerout", () => (find("#tip").hidden = true));
  }

  /** Show the next version of the run; the chosen trajectory has another row. */
  use(run, tokens, row) {
    const { dataset } = this.host, isShown = "row" in dataset, { table } = run;
    this.calls++; // a trajectory that is being read has the row of the version before
    Object.assign(this, { table, tokens, row });
    if (row < 0 && isShown) find("#detail .group")?.remove(); // not in the table any more
    else if (row < 0) this.blank(run.shown ? "Choose a trajectory: click one, or move with ↑ ↓ or k j."
      : "There are no trajectories.");
    else if (isShown && table.trajectory_id[row] === this.id && table.step[row] === this.step) {
      dataset.row = row;
      find("#detail header").replaceChildren(...this.about());
    } else this.show(row).catch(fail);
  }

  /** Show no trajectory, and say why. */
  blank(why) {
    this.calls++; // a trajectory that is being read is not shown
    delete this.host.dataset.row;
    find("#hint").textContent = why;
  }

  async show(row) {
    const call = ++this.calls, known = await this.tokens.of(row);
    if (call !== this.calls) return;
    const id = this.table.trajectory_id[row], isNew = this.id !== id;
    Object.assign(this, { row, known, id, step: this.table.step[row], shown: isNew ? SHOWN : this.shown });
    find("#detail header").replaceChildren(...this.about());
    this.draw();
    this.host.dataset.row = row;
    if (isNew) this.host.scrollTop = 0;
  }

  draw() {
    this.spans = [];
    find("#turns").replaceChildren(...this.segments());
    this.paint();
  }

  /** Return the facts of the trajectory, and the rewards of its group. */
  about() {
    const { row, step } = this;
    const of = Object.fromEntries(Object.entries(this.table).map(([name, values]) => [name, values[row]]));
    const facts = [
      step === null ? "not in a batch" : `step ${step}`, `task ${of.task_id}`, of.source, `seat ${of.seat}`,
      `${count(of.trained_tokens)} of ${plural(of.num_tokens, "token")} sampled`, plural(of.turns, "turn"),
      of.oldest_version === of.newest_version ? `version ${of.oldest_version}`
        : `versions ${of.oldest_version} to ${of.newest_version}`,
      of.interruptions ? plural(of.interruptions, "interruption") : "", of.truncated ? "truncated" : "",
      duration(of.seconds), of.reason ? `${of.state}: ${of.reason}` : of.state,
    ];
    const parts = Object.entries(of.reward_parts).map(([name, value]) =>
      make("span", { className: "chip" }, `${name} `, make("b", {}, format(value))));
    const group = [...this.table.group_id.keys()].filter((other) => this.table.group_id[other] === of.group_id);
    return [make("h3", {}, of.trajectory_id),
      make("p", { className: "reward" }, "reward ", make("b", {}, format(of.reward)), " ", parts),
      make("p", {}, facts.filter(Boolean).join(" · ")),
      make("p", { className: "group" }, "Group ", group.map((other) => make("button", {
        type: "button", className: "chip", ariaPressed: other === row, title: this.table.trajectory_id[other],
        onclick: () => this.onPick(other) }, format(this.table.reward[other]))))];
  }

  segments() {
    const { known } = this, made = [];
    let begin = 0, turn = 0, left = this.shown;
    known.segments.forEach((length, index) => {
      const title = `Segment ${index + 1} of ${known.segments.length}`;
      const receipts = new Map((known.turns[index] ?? []).map((receipt) => [begin + receipt[0], receipt]));
      if (known.segments.length > 1 && left > 0) made.push(make("h4", {}, title + originOf(known, index, begin)));
      for (const block of left > 0 ? blocksOf(known, begin, begin + length) : []) {
        if (left <= 0) break;
        if (block.isSampled) turn++;
        block.end = Math.min(block.end, block.begin + left);
        left -= block.end - block.begin;
        made.push(this.block(block, turn, receipts.get(block.begin + block.lead)));
      }
      begin += length;
    });
    const onclick = () => {
      this.shown = Infinity;
      this.draw();
    };
    const more = begin - this.shown;
    if (more > 0) made.push(make("button", { type: "button", onclick }, `Show ${plural(more, "more token")}`));
    return made;
  }

  block({ begin, end, lead, isSampled, role }, turn, receipt) {
    const { known } = this, words = make("div", { className: "words" });
    for (let at = begin; at < end; at++) {
      const text = known.pieces[at], reward = known.rewards[at];
      const span = make("span", { className: "token", dataset: { at } }, text);
      span.classList.toggle("sampled", isSampled && at >= begin + lead);
      span.classList.toggle("partial", text === "");
      span.classList.toggle("newline", text.includes("\n"));
      span.classList.toggle("special", known.isSpecial(at));
      if (reward) span.dataset.reward = `${reward > 0 ? "+" : ""}${format(reward)}`;
      if (known.mask[at]) this.spans.push([at, span]);
      words.append(span);
    }
    words.dir = "auto"; // set last: it would be computed again for each new span
    const text = known.pieces.slice(begin, end).join("");
    const shown = !isSampled && text.includes("<tool_response>") ? "tool" : role;
    return make("section", { className: isSampled ? "block policy" : "block", dataset: { role: shown } },
      make("h5", {}, isSampled ? `policy, turn ${turn}` : shown,
        make("small", {}, plural(end - begin, "token") + (receipt
          ? `; prompt tokens: ${count(receipt[1])} reused, ${count(receipt[0] - receipt[1])} new` : "")), isSampled ? callsIn(text) : []), words);
  }

  paint() {
    const mode = find("#colour :checked").value;
    const { colour, legend } = scaleOf(mode, this.known, this.step);
    for (const [at, span] of this.spans) {
      const value = this.known[mode]?.[at];
      span.style.backgroundColor = isNumber(value) ? colour(value) : "";
    }
    find("#legend").replaceChildren(...legend);
  }

  /** Show everything about the token under the pointer. */
  point({ target, clientX, clientY }) {
    const at = Number(target.dataset.at ?? NaN), { known } = this, tip = find("#tip");
    if (!Number.isInteger(at)) return;
    const lines = [["token", known.pieces[at] ? JSON.stringify(known.pieces[at]) : "part of a character"],
      ["id", known.ids[at]]];
    const half = (values) => format(Number(values[at].toPrecision(3))); // float16 has three digits
    if (known.mask[at]) {
      const chance = (100 * Math.exp(known.logprobs[at])).toPrecision(3);
      lines.push(["version", format(known.versions[at])], ["logprob", `${half(known.logprobs)} (${chance} %)`],
        ["advantage", half(known.advantages)], ["trainer − sampler", half(known.differences)]);
    } else lines.push(["observed", "not sampled by the policy"]);
    if (known.rewards[at]) lines.push(["reward here", format(known.rewards[at])]);
    tip.replaceChildren(...lines.flatMap(([name, value]) => [make("span", {}, name), make("b", {}, value)]));
    tip.hidden = false;
    tip.style.left = `${Math.max(4, Math.min(clientX + 8, innerWidth - tip.offsetWidth - 8))}px`;
    const isLow = clientY + 18 + tip.offsetHeight > innerHeight;
    tip.style.top = `${isLow ? Math.max(4, clientY - tip.offsetHeight - 12) : clientY + 18}px`;
  }
}
