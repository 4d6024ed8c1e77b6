"use strict";

// A decoder's forward pass with a KV cache; `weights.js` reads its parameters. Axes as in Python: T positions, D model
// width, H query heads, G key/value heads, K width of a head's queries and keys, J of its values, F width of the MLP,
// V vocabulary. A matrix holds a row per output, and arrays of several axes are flat.

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
const geluExact = (x) => 0.5 * x * (1 + erf(x * Math.SQRT1_2));
const ACTIVATIONS = {
  relu: (x) => Math.max(0, x),
  squared_relu: (x) => Math.max(0, x) ** 2,
  gelu,
  gelu_exact: geluExact,
  quick_gelu: (x) => x * sigmoid(1.702 * x),
  silu: (x) => x * sigmoid(x),
  swiglu: (x) => x * sigmoid(x),
  geglu: gelu,
  geglu_exact: geluExact,
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

const logProbability = (logits, token) => logits[token] - logSumExp(logits);

function softmax(logits) {
  const total = logSumExp(logits);
  const p = new Float64Array(logits.length);
  for (let i = 0; i < p.length; i++) p[i] = Math.exp(logits[i] - total);
  return p;
}

// Turn features k and k + K/2 of each of n heads by an angle per position, in place; backwards with direction -1.
function turn(x, frequencies, K, first, n, direction = 1) {
  for (let head = 0; head < x.length / K; head++) {
    const position = direction * (first + Math.floor(head / n));
    frequencies.forEach((frequency, k) => {
      const [cos, sin] = [Math.cos(position * frequency), Math.sin(position * frequency)];
      const [at, other] = [head * K + k, head * K + k + K / 2];
      [x[at], x[other]] = [x[at] * cos - x[other] * sin, x[other] * cos + x[at] * sin];
    });
  }
  return x;
}

// The parameters and settings of a decoder: `config` has the fields of `DecoderConfig`, resolved.
class Model {
  constructor(data) {
    const { config, arrays, max_tokens } = data;
    const size = arrays.reduce((sum, [, size]) => sum + size, 0);
    this.size = size;
    this.matmul = new Matmul(size);
    let at = 0;
    this.parameters = Object.fromEntries(arrays.map(([name, size]) => [name, this.matmul.weights.subarray(at, (at += size))]));
    this.config = config;
    this.maxTokens = max_tokens;
    this.loads = 0;
    this.load(data);
  }

  // Take the parameters of the last frame, or of another one, with which no pass has computed.
  load(data, frame) {
    decodeWeights(data, this.matmul.weights, frame);
    this.loads++;
  }

  // Positions between two looks at the clock, a multiple of four, as `matmul.js` computes four at a time.
  get positionsAtOnce() {
    return Math.max(4, 4 * Math.floor(PRODUCTS_AT_ONCE / this.size / 4));
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
      const y = this.matmul.linear(x, p("W", i), p("b", i), width);
      if (!p("W", i + 1)) return y;
      const gate = p("W_gate", i) ? this.matmul.linear(x, p("W_gate", i), null, width) : null;
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
    const logits = this.matmul.linear(normed, this.parameters[unembedding === "tied" ? "embedding.W_E" : "W_out"], null, D);
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
    this.edits = new Map();
  }

  // Read a text with some activations replaced: a head's output ("block.head") by null, which is zeros, or by an array
  // (T, J) for its first positions; the stream before a block at a position ("block@position") by an array (D). An array
  // that an edit holds must not change. Before each few positions, yield how many of how many are computed; what is
  // computed stays valid where the caller stops there. Return the number of positions.
  *read(tokens, edits = new Map()) {
    const { n_blocks: L } = this.model.config;
    const T = tokens.length;
    if (this.loads !== this.model.loads) [this.loads, this.tokens] = [this.model.loads, []];
    let valid = 0;
    while (valid < T && valid < this.tokens.length && tokens[valid] === this.tokens[valid]) valid++;
    const changed = [...edits, ...this.edits].map(([name]) => name).filter((name) => edits.get(name) !== this.edits.get(name));
    const block = Math.min(L, ...changed.map((name) => Math.max(0, parseInt(name) - name.includes("@")))); // that writes it
    const first = block < L ? 0 : valid;
    const few = this.model.positionsAtOnce;
    this.tokens = tokens.slice(0, first);
    this.edits = new Map(edits);
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
      this.losses[t] = -logProbability(row, this.tokens[t + 1]);
    }
  }

  // Compute the positions from `first` up to `last`, from a block on.
  compute(first, last, block) {
    const { model, stream } = this;
    const { n_blocks: L, d_model: D } = model.config;
    if (block === 0) {
      for (let t = first; t < last; t++) stream[0].set(model.embed(this.tokens[t], t), t * D);
      this.editStream(0, first, last);
    }
    for (; block < L; block++) {
      this.computeBlock(block, first, last);
      this.editStream(block + 1, first, last);
    }
  }

  editStream(block, first, last) {
    for (let t = first; t < last && this.edits.size; t++) {
      const row = this.edits.get(`${block}@${t}`);
      if (row) this.stream[block].set(row, t * row.length);
    }
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
    const q = this.rotate(i, model.matmul.linear(x, p("W_Q"), p("b_Q"), D), p("gamma_Q"), first, H);
    keys[i].set(this.rotate(i, model.matmul.linear(x, p("W_K"), p("b_K"), D), p("gamma_K"), first, G), first * G * K);
    const v = model.matmul.linear(x, p("W_V"), p("b_V"), D);
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
        const edit = this.edits.get(`${i}.${h}`);
        if (edit === null) continue;
        if (position < edit?.length / J) {
          heads.set(edit.subarray(position * J, (position + 1) * J), own * J);
          continue;
        }
        for (let s = start; s <= position; s++) {
          for (let j = 0, at = (s * G + group) * J; j < J; j++) heads[own * J + j] += row[s - start] * values[i][at + j];
        }
      }
    }
    if (p("W_O")) return model.matmul.linear(heads, p("W_O"), p("b_O"), H * J);
    if (H * J === D) return heads;
    const sum = new Float32Array(T * D); // of heads as wide as the model
    heads.forEach((x, i) => (sum[Math.floor(i / (H * J)) * D + (i % D)] += x));
    return sum;
  }

  // Queries or keys after their norm and the rotation by the position.
  rotate(i, x, gamma, first, n) {
    const { head_dim: K, frequencies, qk_eps } = this.model.config;
    if (gamma) x = normalize(x, gamma, null, qk_eps);
    return frequencies[i] ? turn(x, frequencies[i], K, first, n) : x;
  }

  // Logits (V) after a position; after `block` blocks only, unembedded as if it were the last (logit lens).
  logits(position, block = this.model.config.n_blocks) {
    const width = this.width(block);
    return this.model.unembed(this.stream[block].subarray(position * width, (position + 1) * width));
  }

  // Logits (L + 1, V) after a position and none, one … all blocks.
  lens(position) {
    const { n_blocks: L, d_model: D } = this.model.config;
    const x = new Float32Array((L + 1) * D);
    this.stream.forEach((rows, block) => x.set(rows.subarray(position * D, (position + 1) * D), block * D));
    return this.model.unembed(x);
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

  // Outputs (T, J) of a head: the sums of the values by its attention weights.
  output(block, head) {
    const { n_heads: H, n_kv_heads: G, value_dim: J } = this.model.config;
    const y = new Float32Array(this.tokens.length * J);
    for (let t = 0; t < this.tokens.length; t++) {
      const row = this.row(block, head, t);
      for (let s = 0; s <= t; s++) {
        const at = (s * G + Math.floor(head / (H / G))) * J;
        for (let j = 0; j < J; j++) y[t * J + j] += row[s] * this.values[block][at + j];
      }
    }
    return y;
  }

  loss() {
    const losses = this.losses.subarray(0, Math.max(0, this.tokens.length - 1));
    return losses.reduce((a, b) => a + b, 0) / losses.length;
  }
}
