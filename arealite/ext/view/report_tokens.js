// The tokens of trajectories, which are inflated when they are looked at.

const bytesOf = (latin1) => {
  const bytes = new Uint8Array(latin1.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = latin1.charCodeAt(i);
  return bytes;
};

/** Return values of a chunk whose bytes are the planes from `first` on (report_rows.planes). */
function column(Kind, planes, size, first = 0) {
  const width = Kind.BYTES_PER_ELEMENT, bytes = new Uint8Array(size * width);
  for (let plane = 0; plane < width; plane++) {
    for (let i = 0, from = (first + plane) * size; i < size; i++) bytes[i * width + plane] = planes[from + i];
  }
  return new Kind(bytes.buffer);
}

class Tokens {
  /** `version` is that of a live page's data; `texts` are known, by trajectory. */
  constructor(table, version, texts = new Map()) {
    Object.assign(this, { table, version, texts, words: {}, places: [] }); // places: each row's chunk and its begin there
    let row = 0;
    table.chunks.forEach((rows, chunk) => {
      for (let begin = 0, at = 0; at < rows; begin += table.num_tokens[row++]) {
        this.places.push({ chunk, begin, at: at++ });
      }
    });
  }

  /** Read the text of a chunk's token ids, as latin-1: each character is a byte. */
  async vocabulary(chunk) {
    const block = this.version ? `w${chunk}` : "end";
    this.words[block] ??= readJson(block, this.version).then(({ vocabulary: { ids, pieces, special } }) => {
      const raw = [];
      ids.forEach((id, index) => (raw[id] = pieces[index]));
      return { raw, special: new Set(special) };
    });
    return this.words[block];
  }

  async ids(chunk) {
    const planes = await inflate(`t${chunk}`, this.version);
    return column(Uint32Array, planes, planes.length / 4);
  }

  /** Return everything that is known of a row's tokens: arrays of one entry per token. */
  async of(row) {
    const { chunk, begin, at } = this.places[row], end = begin + this.table.num_tokens[row];
    const [all, planes, trees, { raw, special }] = await Promise.all([this.ids(chunk),
      inflate(`x${chunk}`, this.version), readJson(`r${chunk}`, this.version), this.vocabulary(chunk)]);
    const known = (Kind, first) => column(Kind, planes, all.length, first).subarray(begin, end);
    const ids = all.subarray(begin, end), oldest = this.table.oldest_version[row];
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    // A character of several tokens stands at the last of them; the others have no text.
    const pieces = Array.from(ids, (id) => decoder.decode(bytesOf(raw[id]), { stream: true }));
    if (pieces.length) pieces[pieces.length - 1] += decoder.decode();
    return {
      ids, pieces, isSpecial: (at) => special.has(ids[at]), mask: known(Uint8Array, 0),
      versions: Float64Array.from(known(Uint16Array, 1), (age) => oldest + age),
      logprobs: known(Float16Array, 3), advantages: known(Float16Array, 5),
      differences: known(Float16Array, 7), rewards: known(Float32Array, 9),
      segments: this.table.segment_lengths[row],
      turns: trees[at], // by segment: [start, tokens reused, reason] of each turn
    };
  }

  /** Call `each(row, text)` for all rows, with texts in lower case, until `isOld()` is true. */
  async search(each, isOld) {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    const { chunks, num_tokens: lengths, trajectory_id: names } = this.table;
    const read = (chunk, row) => (names.slice(row, row + chunks[chunk]).every((name) => this.texts.has(name))
      ? null : Promise.all([this.ids(chunk), this.vocabulary(chunk)]));
    let row = 0, next = read(0, 0);
    for (const [chunk, rows] of chunks.entries()) {
      const [ids, { raw }] = (await next) ?? [null, {}];
      if (isOld()) return;
      next = read(chunk + 1, row + rows);
      for (const end = row + rows; row < end; row++) {
        if (!this.texts.has(names[row])) {
          const { begin } = this.places[row];
          let text = "";
          for (const id of ids.subarray(begin, begin + lengths[row])) text += raw[id];
          this.texts.set(names[row], decoder.decode(bytesOf(text)).toLowerCase());
        }
        each(row, this.texts.get(names[row]));
      }
      if (chunk % 32 === 31) await new Promise((resolve) => setTimeout(resolve)); // let the page draw
    }
  }
}
