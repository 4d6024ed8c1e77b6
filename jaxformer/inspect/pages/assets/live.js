"use strict";

// A decoder in the page: its tokenizer, its forward pass with a KV cache, and what is shown of them. `live.py`
// packs the run. Axes as in Python: T positions, D model width, H query heads, G key/value heads, K width of a head's
// queries and keys, J of its values, F width of the MLP, V vocabulary. A matrix holds a row per output, and arrays of
// several axes are flat.

function decodeBase64(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

function decodeFloat16(bytes) {
  const number = (bits) => {
    const [exponent, fraction] = [(bits >> 10) & 31, (bits & 1023) / 1024];
    return (bits >> 15 ? -1 : 1) * (exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction);
  };
  const table = Float32Array.from({ length: 2 ** 16 }, (_, bits) => number(bits));
  const numbers = new Float32Array(bytes.length / 2);
  for (let i = 0; i < numbers.length; i++) numbers[i] = table[bytes[2 * i] | (bytes[2 * i + 1] << 8)];
  return numbers;
}

// Numbers, the lowest first (a binary heap).
class Queue {
  items = [];

  push(number) {
    const { items } = this;
    let at = items.push(number) - 1;
    for (let above; at > 0 && items[(above = (at - 1) >> 1)] > number; at = above) items[at] = items[above];
    items[at] = number;
  }

  pop() {
    const { items } = this;
    const [first, last] = [items[0], items.pop()];
    if (!items.length) return first;
    let at = 0;
    for (let below = 1; below < items.length; below = 2 * at + 1) {
      if (items[below + 1] < items[below]) below++;
      if (items[below] >= last) break;
      items[at] = items[below];
      at = below;
    }
    items[at] = last;
    return first;
  }
}

const LONGEST_WORD = 64; // of those whose tokens are kept, in characters

const bytes = (text) => [...new TextEncoder().encode(text)];

// Byte-pair encoding, as the `tokenizers` library does it.
class Tokenizer {
  constructor({ normalizers, splits, symbols, fallback, merges, words, lengths, bytes, begin, end }) {
    Object.assign(this, { normalizers, splits, symbols, fallback, begin, end, isByteLevel: Array.isArray(symbols) });
    const all = decodeBase64(bytes);
    let at = 0;
    this.tokenBytes = lengths.map((length) => all.subarray(at, (at += length)));
    this.ranks = new Map(merges.map(([left, right], rank) => [this.pair(left, right), rank]));
    this.merged = merges.map(([, , token]) => token);
    this.words = new Map(Object.entries(words)); // tokens of pieces
  }

  pair(left, right) {
    return left * 2 ** 24 + right; // ids are below 2^24
  }

  encode(text) {
    for (const step of this.normalizers) text = NORMALIZERS[step.kind](text, step);
    let pieces = text ? [text] : [];
    for (const step of this.splits) pieces = pieces.flatMap((piece, at) => SPLITS[step.kind](piece, step, at));
    return [...this.begin, ...pieces.flatMap((piece) => this.encodePiece(piece))];
  }

  // Merge the pair of the lowest rank, from the left, until there is none.
  encodePiece(piece) {
    const known = this.words.get(piece);
    if (known) return known;
    const tokens = this.symbolsOf(piece); // undefined where one is merged into the one before it
    const [next, previous] = [1, -1].map((step) => Int32Array.from(tokens, (_, at) => at + step));
    const rank = (at) => this.ranks.get(this.pair(tokens[at], tokens[next[at]]));
    const queue = new Queue(); // ranks of pairs, and among equal ones positions
    const add = (at) => { if (rank(at) !== undefined) queue.push(rank(at) * 2 ** 31 + at); };
    for (let at = 0; at < tokens.length - 1; at++) add(at);
    while (queue.items.length) {
      const first = queue.pop();
      const [lowest, at] = [Math.floor(first / 2 ** 31), first % 2 ** 31];
      if (rank(at) !== lowest) continue; // the pair is no more
      tokens[at] = this.merged[lowest];
      tokens[next[at]] = undefined;
      next[at] = next[next[at]];
      if (next[at] < tokens.length) previous[next[at]] = at;
      add(at);
      if (at > 0) add(previous[at]);
    }
    const merged = tokens.filter((token) => token !== undefined);
    if (piece.length <= LONGEST_WORD) this.words.set(piece, merged);
    return merged;
  }

  // The tokens of single bytes or, where the vocabulary is of characters, of those and of the bytes of others.
  symbolsOf(piece) {
    if (this.isByteLevel) return bytes(piece).map((byte) => this.symbols[byte]).filter((token) => token !== null);
    const own = (letter) => Object.hasOwn(this.symbols, letter);
    return [...piece].flatMap((letter) =>
      own(letter) ? [this.symbols[letter]] : bytes(letter).map((byte) => this.fallback[byte]),
    );
  }

  // The first character that the vocabulary lacks, if there is one; no token stands for it.
  lacking(text) {
    if (!this.isByteLevel || !this.symbols.includes(null)) return undefined;
    return [...text].find((letter) => bytes(letter).some((byte) => this.symbols[byte] === null));
  }

  decode(tokens) {
    return utf8(tokens.flatMap((token) => [...(this.tokenBytes[token] ?? [])]));
  }

  // A token's text as a label.
  label(token) {
    if (token === this.end) return "∅";
    const text = this.decode([token]);
    return text ? visible(text) : `[${token}]`;
  }
}

const SYMBOLS = { "\n": "⏎", "\t": "⇥", "\x7f": "␡" };
const controlPicture = (letter) => String.fromCharCode(0x2400 + letter.charCodeAt(0)); // Unicode has one for each
const visible = (text) => text.replace(/[\x00-\x1f\x7f]/g, (letter) => SYMBOLS[letter] ?? controlPicture(letter));
const utf8 = (bytes) => new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes));

const NORMALIZERS = {
  unicode: (text, { form }) => text.normalize(form),
  prepend: (text, { start }) => (text ? start + text : text),
  replace: (text, { pattern, by }) => text.replaceAll(pattern, () => by),
};

// Each returns the pieces of a piece; `at` is its number.
const SPLITS = {
  space: (piece) => [piece.startsWith(" ") ? piece : ` ${piece}`],
  regex(piece, { pattern }) {
    const pieces = [];
    let end = 0;
    for (const match of piece.matchAll(new RegExp(pattern, "gu"))) {
      pieces.push(piece.slice(end, match.index), match[0]);
      end = match.index + match[0].length;
    }
    return [...pieces, piece.slice(end)].filter(Boolean);
  },
  metaspace(piece, { replacement, prepend, split }, at) {
    let text = piece.replaceAll(" ", replacement);
    if ((prepend === "always" || (prepend === "first" && at === 0)) && !text.startsWith(replacement)) text = replacement + text;
    if (!split) return [text];
    const [first, ...rest] = text.split(replacement);
    return [first, ...rest.map((part) => replacement + part)].filter(Boolean);
  },
};

// x Wᵀ + b for rows of x, four at a time, to which zeros are added at the end: so reads are shared by several products,
// and a sum has one order, whatever the number of rows.
function linear(x, W, b, width) {
  const [rows, outputs] = [x.length / width, W.length / width];
  const y = new Float32Array(4 * Math.ceil(rows / 4) * outputs);
  const four = new Float64Array(4 * width);
  for (let row = 0; row < rows; row += 4) {
    for (let r = 0; r < 4; r++) {
      for (let i = 0; i < width; i++) four[4 * i + r] = row + r < rows ? x[(row + r) * width + i] : 0;
    }
    for (let j = 0; j < outputs; j += 2) {
      const other = Math.min(j + 1, outputs - 1); // once more the last, where the number is odd
      const start = j * width;
      const otherStart = other * width;
      let s0 = b ? b[j] : 0;
      let u0 = b ? b[other] : 0;
      let s1 = s0, s2 = s0, s3 = s0, u1 = u0, u2 = u0, u3 = u0;
      for (let i = 0; i < width; i++) {
        const w = W[start + i], v = W[otherStart + i];
        const x0 = four[4 * i], x1 = four[4 * i + 1], x2 = four[4 * i + 2], x3 = four[4 * i + 3];
        s0 += w * x0; s1 += w * x1; s2 += w * x2; s3 += w * x3;
        u0 += v * x0; u1 += v * x1; u2 += v * x2; u3 += v * x3;
      }
      const at = row * outputs;
      y[at + j] = s0; y[at + outputs + j] = s1; y[at + 2 * outputs + j] = s2; y[at + 3 * outputs + j] = s3;
      y[at + other] = u0; y[at + outputs + other] = u1; y[at + 2 * outputs + other] = u2; y[at + 3 * outputs + other] = u3;
    }
  }
  return y.subarray(0, rows * outputs);
}

// Rows of x after RMSNorm or, with a shift beta, LayerNorm.
function normalize(x, gamma, beta, eps) {
  const width = gamma.length;
  const y = new Float32Array(x.length);
  for (let start = 0; start < x.length; start += width) {
    let mean = 0;
    if (beta) for (let i = 0; i < width; i++) mean += x[start + i] / width;
    let square = 0;
    for (let i = 0; i < width; i++) square += (x[start + i] - mean) ** 2 / width;
    const scale = 1 / Math.sqrt(square + eps);
    for (let i = 0; i < width; i++) y[start + i] = (x[start + i] - mean) * scale * gamma[i] + (beta ? beta[i] : 0);
  }
  return y;
}

// Error function (Abramowitz and Stegun 1964, 7.1.26), to 1.5e-7.
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const sum = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  return Math.sign(x) * (1 - sum * Math.exp(-x * x));
}

const sigmoid = (x) => 1 / (1 + Math.exp(-x));
const gelu = (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
const ACTIVATIONS = {
  relu: (x) => Math.max(0, x),
  squared_relu: (x) => Math.max(0, x) ** 2,
  gelu,
  gelu_exact: (x) => 0.5 * x * (1 + erf(x * Math.SQRT1_2)),
  quick_gelu: (x) => x * sigmoid(1.702 * x),
  swiglu: (x) => x * sigmoid(x),
  geglu: gelu,
  tanh: Math.tanh,
};

// Logarithm of the sum of exponentials: a logit less this is a log-probability.
function logSumExp(logits) {
  let largest = -Infinity;
  for (let i = 0; i < logits.length; i++) largest = Math.max(largest, logits[i]);
  let sum = 0;
  for (let i = 0; i < logits.length; i++) sum += Math.exp(logits[i] - largest);
  return largest + Math.log(sum);
}

function softmax(logits) {
  const total = logSumExp(logits);
  const p = new Float64Array(logits.length);
  for (let i = 0; i < p.length; i++) p[i] = Math.exp(logits[i] - total);
  return p;
}

// The parameters and settings of a decoder: `config` has the fields of `DecoderConfig`, resolved.
class Model {
  constructor({ config, arrays, weights, max_tokens }) {
    const numbers = decodeFloat16(decodeBase64(weights));
    let at = 0;
    this.parameters = Object.fromEntries(arrays.map(([name, size]) => [name, numbers.subarray(at, (at += size))]));
    this.config = config;
    this.maxTokens = max_tokens;
    this.size = numbers.length;
  }

  embed(token, position) {
    const { d_model: D, embedding_scale, positions } = this.config;
    const { "embedding.W_E": W_E, "embedding.W_pos": W_pos } = this.parameters;
    return Float32Array.from({ length: D }, (_, i) => {
      let encoding = W_pos ? W_pos[position * D + i] : 0;
      if (positions === "sinusoidal") {
        const angle = position * 10000 ** (-(i - (i % 2)) / D);
        encoding = i % 2 ? Math.cos(angle) : Math.sin(angle);
      }
      return embedding_scale * W_E[token * D + i] + encoding;
    });
  }

  norm(x, name) {
    const { [`${name}.gamma`]: gamma, [`${name}.beta`]: beta } = this.parameters;
    return gamma ? normalize(x, gamma, beta, this.config.norm_eps) : x;
  }

  mlp(x, name, width) {
    const p = (part, i) => this.parameters[`${name}.${part}_${i}`];
    const act = ACTIVATIONS[this.config.activation];
    for (let i = 1; ; i++) {
      const y = linear(x, p("W", i), p("b", i), width);
      if (!p("W", i + 1)) return y;
      const gate = p("W_gate", i) ? linear(x, p("W_gate", i), null, width) : null;
      for (let j = 0; j < y.length; j++) y[j] = gate ? act(gate[j]) * y[j] : act(y[j]);
      width = p("W", i).length / width;
      x = y;
    }
  }

  // Logits (T, V) of rows of the residual stream, (T, D).
  unembed(x) {
    const { unembedding, d_model: D, logit_soft_cap: cap } = this.config;
    const normed = this.norm(x, "final_norm");
    if (unembedding === "mlp") return normed;
    const logits = linear(normed, this.parameters[unembedding === "tied" ? "embedding.W_E" : "W_out"], null, D);
    return cap ? logits.map((logit) => cap * Math.tanh(logit / cap)) : logits;
  }
}

// A forward pass over a text with all that it computed: per block the residual stream before it, (T, D), keys, (T, G, K),
// values, (T, G, J), and attention weights, (H, T, T), where T is the most that there may be. What is still valid is a
// cache.
class Pass {
  constructor(model) {
    this.model = model;
    const { n_blocks: L, d_model: D, n_heads: H, n_kv_heads: G, head_dim: K, value_dim: J, vocab_size: V, unembedding } = model.config;
    const N = model.maxTokens;
    const arrays = (n, width) => Array.from({ length: n }, (_, i) => new Float32Array(N * width(i)));
    this.stream = arrays(L + 1, (i) => (unembedding === "mlp" && i === L ? V : D));
    [this.keys, this.values] = [arrays(L, () => G * K), arrays(L, () => G * J)];
    this.weights = arrays(L, () => H * N);
    this.losses = new Float32Array(N); // of the token after each position, in nats
    this.tokens = [];
    this.off = new Set();
  }

  // Read a text with some heads switched off ("block.head"): zero ablation. Before each few positions, yield how many of
  // how many are computed; what is computed stays valid where the caller stops there. Return the number of positions.
  *read(tokens, off = new Set()) {
    const { n_blocks: L, n_heads: H } = this.model.config;
    const T = tokens.length;
    let valid = 0;
    while (valid < T && valid < this.tokens.length && tokens[valid] === this.tokens[valid]) valid++;
    const isSame = (block) => Array.from({ length: H }, (_, h) => `${block}.${h}`).every((head) => off.has(head) === this.off.has(head));
    let block = 0;
    while (block < L && isSame(block)) block++;
    const first = block < L ? 0 : valid;
    const few = Math.max(4, 4 * Math.floor(PRODUCTS_AT_ONCE / this.model.size / 4)); // as `linear` computes four at a time
    this.tokens = tokens.slice(0, first);
    this.off = new Set(off);
    for (let start = first, end; start < T; start = end) {
      yield [start - first, T - first];
      end = Math.min(start + few, start < valid ? valid : T);
      this.tokens = tokens.slice(0, end);
      this.compute(start, end, start < valid ? block : 0);
      this.computeLosses(Math.max(0, start - 1), end - 1);
    }
    return T - first;
  }

  computeLosses(first, last) {
    if (first === last) return;
    const width = this.width(this.model.config.n_blocks);
    const logits = this.model.unembed(this.stream.at(-1).subarray(first * width, last * width));
    const V = logits.length / (last - first);
    for (let t = first; t < last; t++) {
      const row = logits.subarray((t - first) * V, (t - first + 1) * V);
      this.losses[t] = logSumExp(row) - row[this.tokens[t + 1]];
    }
  }

  // Compute the positions from `first` up to `last`, from a block on.
  compute(first, last, block) {
    const { model, stream } = this;
    const { n_blocks: L, d_model: D } = model.config;
    if (block === 0) for (let t = first; t < last; t++) stream[0].set(model.embed(this.tokens[t], t), t * D);
    for (; block < L; block++) this.computeBlock(block, first, last);
  }

  computeBlock(i, first, last) {
    const { model } = this;
    const { d_model: D, norm_placement, residual } = model.config;
    const before = (x, part) => (norm_placement === "post" ? x : model.norm(x, `blocks_${i}.${part}_norm`));
    const after = (x, y, part) => {
      if (norm_placement === "both") y = model.norm(y, `blocks_${i}.${part}_post_norm`);
      if (residual) for (let j = 0; j < y.length; j++) y[j] += x[j];
      return norm_placement === "post" ? model.norm(y, `blocks_${i}.${part}_norm`) : y;
    };
    let x = this.stream[i].subarray(first * D, last * D);
    x = after(x, this.attention(i, before(x, "attention"), first), "attention");
    x = after(x, model.mlp(before(x, "mlp"), `blocks_${i}.mlp`, D), "mlp");
    this.stream[i + 1].set(x, (first * x.length) / (last - first));
  }

  // Attention of rows x, whose positions begin at `first`, to all positions up to their own.
  attention(i, x, first) {
    const { model, keys, values, weights } = this;
    const { d_model: D, n_heads: H, n_kv_heads: G, head_dim: K, value_dim: J, windows, scale, embedding_scale } = model.config;
    const [T, N, p] = [x.length / D, model.maxTokens, (name) => model.parameters[`blocks_${i}.attention.${name}`]];
    const q = this.rotate(i, linear(x, p("W_Q"), p("b_Q"), D), p("gamma_Q"), first, H);
    keys[i].set(this.rotate(i, linear(x, p("W_K"), p("b_K"), D), p("gamma_K"), first, G), first * G * K);
    const v = linear(x, p("W_V"), p("b_V"), D);
    const table = model.parameters["value_embedding.W_E"];
    if (table) for (let j = 0; j < v.length; j++) v[j] += embedding_scale * table[this.tokens[first + Math.floor(j / (G * J))] * G * J + (j % (G * J))];
    values[i].set(v, first * G * J);
    const heads = new Float32Array(T * H * J);
    for (let t = 0; t < T; t++) {
      const position = first + t;
      const start = Math.max(0, position - windows[i] + 1);
      for (let h = 0; h < H; h++) {
        const [own, group] = [t * H + h, Math.floor(h / (H / G))];
        const scores = new Float64Array(position + 1 - start);
        for (let s = start; s <= position; s++) {
          let sum = 0;
          for (let k = 0, at = (s * G + group) * K; k < K; k++) sum += q[own * K + k] * keys[i][at + k];
          scores[s - start] = scale * sum;
        }
        const row = softmax(scores);
        weights[i].subarray((h * N + position) * N, (h * N + position + 1) * N).fill(0).set(row, start);
        if (this.off.has(`${i}.${h}`)) continue;
        for (let s = start; s <= position; s++) {
          for (let j = 0, at = (s * G + group) * J; j < J; j++) heads[own * J + j] += row[s - start] * values[i][at + j];
        }
      }
    }
    if (p("W_O")) return linear(heads, p("W_O"), p("b_O"), H * J);
    if (H * J === D) return heads;
    const sum = new Float32Array(T * D); // of heads as wide as the model
    heads.forEach((x, i) => (sum[Math.floor(i / (H * J)) * D + (i % D)] += x));
    return sum;
  }

  // Queries or keys after their norm and the rotation of features k and k + K/2 by the position.
  rotate(i, x, gamma, first, n) {
    const { head_dim: K, frequencies, qk_eps } = this.model.config;
    if (gamma) x = normalize(x, gamma, null, qk_eps);
    if (!frequencies[i]) return x;
    for (let head = 0; head < x.length / K; head++) {
      const position = first + Math.floor(head / n);
      frequencies[i].forEach((frequency, k) => {
        const [cos, sin] = [Math.cos(position * frequency), Math.sin(position * frequency)];
        const [at, other] = [head * K + k, head * K + k + K / 2];
        [x[at], x[other]] = [x[at] * cos - x[other] * sin, x[other] * cos + x[at] * sin];
      });
    }
    return x;
  }

  // Logits (V) after a position; after `block` blocks only, unembedded as if it were the last (logit lens).
  logits(position, block = this.model.config.n_blocks) {
    const width = this.width(block);
    return this.model.unembed(this.stream[block].subarray(position * width, (position + 1) * width));
  }

  // Width of the residual stream before a block.
  width(block) {
    return this.stream[block].length / this.model.maxTokens;
  }

  // Attention weights (T) of a head from a position.
  row(block, head, position) {
    const start = (head * this.model.maxTokens + position) * this.model.maxTokens;
    return this.weights[block].subarray(start, start + this.tokens.length);
  }

  loss() {
    const losses = this.losses.subarray(0, Math.max(0, this.tokens.length - 1));
    return losses.reduce((a, b) => a + b, 0) / losses.length;
  }
}

// Most characters of a text that is typed or pasted: a browser takes a second to lay out tens of thousands of lines.
const LONGEST_TEXT = 4096;
// Products with weights between two looks at the clock, those of an update that is announced before it begins, and
// milliseconds of computing after which the page goes on.
const [PRODUCTS_AT_ONCE, LONG_PRODUCTS, TASK_MS] = [4e7, 1e8, 50];
// Next tokens that are shown, likeliest tokens per layer, keys that the note names, and bounds of the map's cells.
const [NEXT_TOKENS, LENS_TOKENS, NAMED_KEYS, MAP_CELLS] = [7, 3, 4, { least: 1, labelled: 11, most: 34, letters: 10 }];

// The n indices of the largest values, in descending order.
function largest(values, n) {
  const best = [];
  for (let i = 0; i < values.length; i++) {
    if (best.length === n && values[i] <= values[best[n - 1]]) continue;
    let at = best.length;
    while (at > 0 && values[best[at - 1]] < values[i]) at--;
    best.splice(at, 0, i);
    best.length = Math.min(best.length, n);
  }
  return best;
}

function sample(probabilities) {
  let left = Math.random();
  const token = probabilities.findIndex((p) => (left -= p) < 0);
  return token < 0 ? largest(probabilities, 1)[0] : token; // where rounding leaves something
}

function live(container, data) {
  const [model, tokenizer] = [new Model(data), new Tokenizer(data.tokenizer)];
  const { n_blocks: L, n_heads: H, n_kv_heads: G, head_dim: K, value_dim: J, has_lens } = model.config;
  const label = (token) => tokenizer.label(token);
  const quoted = (token) => `“${label(token)}”`;
  const full = new Pass(model); // with all heads
  const ablated = new Pass(model); // without those in `off`
  const off = new Set();
  let [typed, generated, tokens] = ["", [], []]; // the text as typed, the tokens added to it, the tokens of both
  let [position, pinned, chosen, computed] = [0, false, [0, 0], 0]; // `computed` positions by the last update
  let frame = 0; // animation frame that will read what was typed
  let [job, timer] = [null, 0]; // the computation of what was read, until it is shown, and what continues it
  const active = () => (off.size ? ablated : full);
  let ink = []; // colour of attention, read once per update: reading it makes the browser compute styles
  const shade = (weight) => `rgba(${ink}, ${Math.sqrt(weight) / 2})`;

  const field = make("label", container, "Your text", "field");
  const area = make("textarea", field);
  [area.rows, area.spellcheck, area.autocapitalize, area.maxLength] = [3, false, "off", LONGEST_TEXT];
  const controls = make("div", container, "", "controls");
  const add = (text, title, pick) => {
    const button = make("button", controls, text);
    button.title = title;
    const logits = () => active().logits(tokens.length - 1).subarray(0, tokenizer.tokenBytes.length); // of tokens with a text
    button.addEventListener("click", () => append(pick(logits())));
    return button;
  };
  const steps = [
    add("Append the most likely token", "one greedy decode step", (logits) => largest(logits, 1)[0]),
    add("Sample a token", "one decode step that samples", (logits) => sample(softmax(logits.map((x) => x / temperature.value)))),
  ];
  const temperature = make("input", make("label", controls, "at temperature "));
  Object.assign(temperature, { type: "number", min: 0.1, max: 5, step: 0.1, value: 0.8 });
  temperature.addEventListener("change", () => { temperature.value = clamp(Number(temperature.value) || 0.8, 0.1, 5); });
  const again = make("button", controls, "Start again");
  const status = make("p", container, "", "status");
  const strip = make("div", container, "", "tokens");
  const note = make("p", container, "", "note");
  const predictions = make("div", container, "", "columns");
  const [next, lens] = [make("div", predictions), has_lens ? make("div", predictions) : null];
  const attention = make("div", container, "", "columns");
  const [heads, map] = [make("div", attention, "", "heads"), make("div", attention, "", "map")];
  const cache = make("div", container, "", "cache");
  const tiles = makeTiles();
  let drawnMap = null;

  // Read the text, compute, and show all of it, and what follows a position. What takes long lets the page go on
  // between its parts, and gives way to the next update.
  function update(at = Infinity) {
    clearTimeout(timer);
    const start = performance.now();
    let isAnnounced = false;
    const all = [...tokenizer.encode(typed), ...generated];
    tokens = all.slice(0, model.maxTokens);
    job = compute();
    work();

    function* compute() {
      const n = yield* full.read(tokens);
      return off.size ? Math.max(n, yield* ablated.read(tokens, off)) : n;
    }

    function work() {
      const begun = performance.now();
      for (;;) {
        const { done, value } = job.next();
        if (done) return show(value);
        const [n, total] = value;
        const isLong = !isAnnounced && total * model.size > LONG_PRODUCTS;
        if (!isLong && performance.now() - begun < TASK_MS) continue;
        isAnnounced = true;
        setBusy(true);
        status.textContent = `Computing: ${n} of ${total} positions …`;
        timer = setTimeout(work);
        return;
      }
    }

    function show(n) {
      [job, computed] = [null, n];
      setBusy(false);
      showAll(all.length, performance.now() - start);
      pinned &&= at < tokens.length;
      if (tokens.length) select(Math.min(at, tokens.length - 1));
    }
  }

  // Buttons that add a token keep the focus meanwhile, which `disabled` would take.
  function setBusy(isBusy) {
    container.ariaBusy = isBusy;
    for (const button of steps) button.ariaDisabled = isBusy;
  }

  // Show all but what depends on a position, for a text of n tokens that took some milliseconds.
  function showAll(n, time) {
    ink = colour("--look").split(",").map(Number);
    const counts = [`${tokens.length} of at most ${model.maxTokens} tokens`];
    if (n > tokens.length) counts[0] = `${format(n)} tokens, of which the model uses the first ${model.maxTokens}`;
    const lacking = tokenizer.lacking(typed);
    if (lacking !== undefined) counts.push(`${visible(lacking)} has no token, and is left out`);
    if (tokens.length) counts.push(`${computed} computed in ${time.toFixed(1)} ms, ${tokens.length - computed} read from the cache`);
    if (tokens.length > 1) counts.push(`loss ${full.loss().toFixed(3)} nats per token`);
    if (tokens.length > 1 && off.size) counts[counts.length - 1] += `, ${ablated.loss().toFixed(3)} with ${off.size === 1 ? "the head" : `the ${off.size} heads`} ablated`;
    status.textContent = `${counts.join("; ")}.`;
    for (const button of steps) button.disabled = !tokens.length || n >= model.maxTokens;
    strip.replaceChildren();
    tokens.forEach((token, at) => {
      const button = make("button", strip, label(token));
      [button.dataset.at, button.tabIndex] = [at, at === tokens.length - 1 ? 0 : -1];
      if (label(token).endsWith("⏎")) strip.append("\n");
    });
    for (const part of [note, predictions, attention, cache]) part.hidden = !tokens.length;
    if (!tokens.length) return;
    for (const tile of tiles) tile.paint();
    drawMap();
    drawCache();
  }

  function append(token) {
    if (job || steps[0].disabled) return; // by what was typed just before the click
    generated.push(token);
    area.value = typed + tokenizer.decode(generated);
    update();
    area.scrollTop = area.scrollHeight;
  }

  // Show what follows a position, and where the chosen head looks from there.
  function select(at) {
    if (job) return; // the tokens shown are of another text
    position = at;
    const [block, head] = chosen;
    const row = active().row(block, head, at);
    for (const button of strip.children) {
      const key = Number(button.dataset.at);
      button.classList.toggle("from", key === at);
      button.style.background = shade(row[key]);
    }
    const named = largest(row.subarray(0, at + 1), NAMED_KEYS).filter((key) => row[key] >= 0.0005);
    const keys = named.map((key) => `${quoted(tokens[key])} ${percent(row[key])}`).join(", ");
    note.setAttribute("aria-live", document.activeElement === area ? "off" : "polite");
    const switched = off.has(chosen.join(".")) ? ", which is ablated," : "";
    note.textContent = `Position ${at}, ${quoted(tokens[at])}: head ${head} of layer ${block}${switched} attends to ${keys}.`;
    drawNext();
    if (lens) drawLens();
  }

  function drawNext() {
    next.replaceChildren();
    make("h3", next, `Next token after ${quoted(tokens[position])}`);
    const [before, after] = [softmax(full.logits(position)), off.size ? softmax(ablated.logits(position)) : null];
    const [actual, isLast] = [tokens[position + 1], position === tokens.length - 1];
    const shown = new Set([...largest(before, NEXT_TOKENS), ...(after ? largest(after, NEXT_TOKENS) : [])]);
    if (!isLast) shown.add(actual);
    const list = make("ul", next, "", after ? "bars compared" : "bars");
    for (const token of [...shown].sort((a, b) => before[b] - before[a])) {
      const line = make("li", list, "", token === actual ? "marked" : "");
      const name = make("button", line, label(token), "label");
      name.disabled = !isLast || steps[0].disabled;
      name.title = name.disabled ? "" : "append this token";
      name.addEventListener("click", () => append(token));
      const tracks = make("span", line, "", "tracks");
      const values = after ? [before[token], after[token]] : [before[token]];
      for (const p of values) make("span", make("span", tracks, "", "track"), "", "bar").style.width = `${100 * p}%`;
      make("span", line, values.map(percent).join(" → "), "value");
      if (token === actual) make("span", line, "in the text", "mark");
    }
    if (after) make("p", next, "Above: all heads; below: with the selected heads ablated.", "name");
    else if (isLast) make("p", next, "Click to append the token.", "name");
  }

  function drawLens() {
    lens.replaceChildren();
    make("h3", lens, `Logit lens after ${quoted(tokens[position])}`);
    const body = make("tbody", make("table", lens));
    for (let block = 0; block <= L; block++) {
      const line = make("tr", body);
      make("th", line, block === 0 ? "embedding" : `layer ${block - 1}`).scope = "row";
      const p = softmax(active().logits(position, block));
      for (const token of largest(p, LENS_TOKENS)) {
        const cell = make("td", line, `${label(token)} `);
        cell.style.background = shade(p[token]);
        make("span", cell, percent(p[token]), "share");
      }
    }
    make("p", lens, "The most likely next tokens, were the residual stream unembedded after each layer.", "name");
  }

  // A tile per head: its attention map to choose it by, and its switch.
  function makeTiles() {
    make("h3", heads, "Heads");
    make("p", heads, "Select a head to see its attention; clear its box to ablate it (zero ablation).", "name");
    const made = [];
    for (let block = 0; block < L; block++) {
      make("span", heads, `layer ${block}`, "name");
      const line = make("div", heads, "", "layer");
      for (let head = 0; head < H; head++) made.push(makeTile(make("div", line, "", "tile"), block, head));
    }
    return made;
  }

  function makeTile(tile, block, head) {
    const button = make("button", tile);
    button.setAttribute("aria-label", `attention of head ${head} of layer ${block}`);
    button.setAttribute("aria-pressed", block === 0 && head === 0);
    const canvas = make("canvas", button);
    button.addEventListener("click", () => {
      for (const other of heads.querySelectorAll("button")) other.setAttribute("aria-pressed", other === button);
      chosen = [block, head];
      if (job) return; // which ends by drawing it
      drawMap();
      drawCache();
      select(position);
    });
    const name = make("label", tile);
    const box = make("input", name);
    [box.type, box.checked] = ["checkbox", true];
    box.setAttribute("aria-label", `head ${head} of layer ${block}`);
    name.append(` head ${head}`);
    const show = () => {
      const isOff = off.has(`${block}.${head}`);
      box.checked = !isOff;
      tile.classList.toggle("off", isOff);
      paintMap(canvas, block, head);
    };
    box.addEventListener("change", () => {
      if (box.checked) off.delete(`${block}.${head}`);
      else off.add(`${block}.${head}`);
      update(position);
    });
    return { paint: show };
  }

  // Opacity is the root of the weight, so that small ones show.
  function paintMap(canvas, block, head) {
    const T = tokens.length;
    [canvas.width, canvas.height] = [T, T];
    canvas.style.imageRendering = T > 64 ? "auto" : "pixelated";
    const context = canvas.getContext("2d");
    const image = context.createImageData(T, T);
    const pixels = new Uint32Array(image.data.buffer); // a byte each for red, green, blue and opacity, the first lowest
    const rgb = ink[0] | (ink[1] << 8) | (ink[2] << 16);
    for (let query = 0; query < T; query++) {
      const row = active().row(block, head, query);
      for (let key = 0; key <= query; key++) pixels[query * T + key] = rgb | (Math.round(255 * Math.sqrt(row[key])) << 24);
    }
    context.putImageData(image, 0, 0);
  }

  function drawMap() {
    const [block, head] = chosen;
    drawnMap?.remove();
    map.replaceChildren();
    make("h3", map, `Attention of head ${head} of layer ${block}`);
    make("p", map, "Queries are rows, keys are columns.", "name");
    const names = tokens.map((token) => {
      const text = label(token);
      return text.length > MAP_CELLS.letters ? `${text.slice(0, MAP_CELLS.letters - 1)}…` : text;
    });
    const margin = 40 + 1.72 * CHARACTER_PIXELS * Math.max(...names.map((name) => name.length)); // for both labels
    const side = clamp((map.clientWidth - margin) / tokens.length, MAP_CELLS.least, MAP_CELLS.most);
    const labels = side >= MAP_CELLS.labelled ? names : names.map(() => "");
    const [shown, rows] = [tokens, tokens.map((_, query) => active().row(block, head, query))];
    drawnMap = cells(map, {
      title: `attention of head ${head} of layer ${block}`, rows: labels, columns: labels, cell: [side, side], gap: side > 7,
      columnLabels: side >= MAP_CELLS.labelled,
      colours: () => {
        const pixel = [...ink, 0];
        return (query, key) => {
          pixel[3] = 255 * Math.sqrt(rows[query][key]);
          return pixel;
        };
      },
      told: (query, key) => `${quoted(shown[query])} (${query}) to ${quoted(shown[key])} (${key}): ${percent(rows[query][key])}`,
      chosen: (query) => { if (!pinned) select(query); },
    });
  }

  // Keys and values of the chosen head in all slots of the cache, a column each.
  function drawCache() {
    cache.replaceChildren();
    const [[block, head], pass, T, N] = [chosen, active(), tokens.length, model.maxTokens];
    const group = Math.floor(head / (H / G));
    make("h3", cache, "KV cache");
    const numbers = L * G * (K + J);
    const perPosition = Object.entries(model.parameters)
      .filter(([name]) => /W_(Q|K|V|O|out|gate|\d)/.test(name)).reduce((sum, [, array]) => sum + array.length, 0);
    const heads = `${G} ${G === 1 ? "head" : "heads"}${G < H ? ` (each serves ${H / G} heads of queries)` : ""}`;
    const multiplications = (n) => `${((n * perPosition) / 1e6).toPrecision(3)} million`;
    const saved = computed < T ? `, ${multiplications(computed)} multiplications with weights instead of ${multiplications(T)}` : "";
    make("p", cache, `${T} of ${N} slots hold a token, each with ${format(numbers)} numbers: keys ${K === J ? "" : `of width ${K} `}and values of width ${J} for ${heads} of ${L} ${L === 1 ? "layer" : "layers"}. The last update computed ${computed === 1 ? "one position" : `${computed} positions`}, marked by the line below the columns${saved}.`);
    const canvas = make("canvas", cache);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `keys and values of head ${head} of layer ${block}, ${T} of ${N} slots filled`);
    const parts = [pass.keys[block], pass.values[block]];
    const scales = parts.map((part) => {
      const filled = part.subarray(0, (T * part.length) / N);
      return colourScale(filled.reduce((a, b) => Math.max(a, Math.abs(b)), 1e-30), true);
    });
    const [accent, none] = [[...rgb("--accent"), 255], [0, 0, 0, 0]];
    paint(canvas, N, K + J + 3, (row, slot) => {
      if (slot >= T || row === K || row === K + J + 1) return none;
      if (row === K + J + 2) return slot >= T - computed ? accent : none;
      if (row < K) return scales[0](parts[0][(slot * G + group) * K + row]);
      return scales[1](parts[1][(slot * G + group) * J + row - K - 1]);
    });
    make("p", cache, `Keys above, values below, of head ${head} of layer ${block}; a column per slot.`, "name");
  }

  function readArea() {
    cancelAnimationFrame(frame);
    [frame, typed, generated] = [0, area.value, []];
    update();
  }
  function begin() {
    area.value = data.text;
    off.clear();
    readArea();
  }
  // Keys that come faster than frames are read together, and before what a click does.
  area.addEventListener("input", () => { frame ||= requestAnimationFrame(readArea); });
  container.addEventListener("click", () => { if (frame) readArea(); }, true);
  again.addEventListener("click", begin);
  const tokenAt = (event) => event.target.dataset.at && Number(event.target.dataset.at);
  for (const name of ["pointerover", "focusin"]) {
    strip.addEventListener(name, (event) => { if (tokenAt(event) !== undefined && !pinned) select(tokenAt(event)); });
  }
  rove(strip);
  strip.addEventListener("click", (event) => {
    const at = tokenAt(event);
    if (at === undefined) return;
    pinned = !(pinned && at === position);
    select(at);
  });
  strip.addEventListener("pointerleave", () => { if (!pinned) select(tokens.length - 1); });
  dark.addEventListener("change", () => update(position));
  let width = 0;
  new ResizeObserver(() => {
    if (map.clientWidth !== width && tokens.length && !job) drawMap();
    width = map.clientWidth;
  }).observe(container);
  begin();
}

drawEach("live", (container, data) => {
  const loading = make("p", container, "Loading the model …", "loading");
  new IntersectionObserver((entries, observer) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    setTimeout(() => { // the page is painted first
      live(container, data);
      loading.remove();
    });
  }, { rootMargin: "50%" }).observe(container);
});
