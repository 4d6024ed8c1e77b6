import { block as computeBlock, type Operations, type Wiring } from "../decoder";
import { Matmul } from "./matmul";
import { decodeWeights, type Packed } from "./weights";

// A decoder with a KV cache; `weights.ts` reads its parameters. Axes as in Python: T positions, D model width, H query
// heads, G key/value heads, K width of a head's queries and keys, J of its values, F width of the MLP, V vocabulary. A
// matrix holds a row per output, and arrays of several axes are flat.

type Numbers = Float32Array;
/** Logits, of any precision. */
type Logits = ArrayLike<number>;

/** Fields of `DecoderConfig`, resolved; see `pack_settings` in `live.py`. */
export interface Config extends Wiring {
  vocab_size: number;
  d_model: number;
  n_blocks: number;
  n_heads: number;
  n_kv_heads: number;
  head_dim: number;
  value_dim: number;
  scale: number;
  windows: number[];
  frequencies: (number[] | null)[];
  activation: keyof typeof ACTIVATIONS;
  norm_eps: number;
  qk_eps: number;
  positions: string;
  embedding_scale: number;
  unembedding: string;
  logit_soft_cap: number | null;
  has_lens: boolean;
}

/** What replaces an activation, by its name; see `Pass.read`. */
export type Edits = Map<string, Numbers | null>;

/** Products with weights between two looks at the clock. */
export const PRODUCTS_AT_ONCE = 4e7;

// Rows of x after RMSNorm or, with a shift beta, LayerNorm.
export function normalize(x: Numbers, gamma: Numbers, beta: Numbers | null, eps: number): Numbers {
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
export function erf(x: number): number {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const sum = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  return Math.sign(x) * (1 - sum * Math.exp(-x * x));
}

export const sigmoid = (x: number) => 1 / (1 + Math.exp(-x));
const gelu = (x: number) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
const geluExact = (x: number) => 0.5 * x * (1 + erf(x * Math.SQRT1_2));
export const ACTIVATIONS = {
  relu: (x: number) => Math.max(0, x),
  squared_relu: (x: number) => Math.max(0, x) ** 2,
  gelu,
  gelu_exact: geluExact,
  quick_gelu: (x: number) => x * sigmoid(1.702 * x),
  silu: (x: number) => x * sigmoid(x),
  swiglu: (x: number) => x * sigmoid(x),
  geglu: gelu,
  geglu_exact: geluExact,
  tanh: Math.tanh,
};

// Logarithm of the sum of exponentials: a logit less this is a log-probability.
export function logSumExp(logits: Logits): number {
  let largest = -Infinity;
  for (let i = 0; i < logits.length; i++) largest = Math.max(largest, logits[i]);
  let sum = 0;
  for (let i = 0; i < logits.length; i++) sum += Math.exp(logits[i] - largest);
  return largest + Math.log(sum);
}

export const logProbability = (logits: Logits, token: number) => logits[token] - logSumExp(logits);

export function softmax(logits: Logits): Float64Array {
  const total = logSumExp(logits);
  const p = new Float64Array(logits.length);
  for (let i = 0; i < p.length; i++) p[i] = Math.exp(logits[i] - total);
  return p;
}

// Turn features k and k + K/2 of each of n heads by an angle per position, in place; backwards with direction -1.
export function turn(x: Numbers, frequencies: number[], K: number, first: number, n: number, direction = 1): Numbers {
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

// The parameters and settings of a decoder.
export class Model {
  readonly config: Config;
  readonly size: number;
  readonly maxTokens: number;
  readonly matmul: Matmul;
  readonly parameters: Record<string, Numbers>;
  loads = 0;

  constructor(data: Packed & { config: Config; max_tokens: number }) {
    const { config, arrays, max_tokens } = data;
    const size = arrays.reduce((sum, [, size]) => sum + size, 0);
    this.size = size;
    this.matmul = new Matmul(size);
    let at = 0;
    this.parameters = Object.fromEntries(
      arrays.map(([name, size]) => [name, this.matmul.weights.subarray(at, (at += size))]),
    );
    this.config = config;
    this.maxTokens = max_tokens;
    this.load(data);
  }

  // Take the parameters of the last frame, or of another one, with which no pass has computed.
  load(data: Packed, frame?: number): void {
    decodeWeights(data, this.matmul.weights, frame);
    this.loads++;
  }

  // Positions between two looks at the clock, a multiple of four, as `matmul.ts` computes four at a time.
  get positionsAtOnce(): number {
    return Math.max(4, 4 * Math.floor(PRODUCTS_AT_ONCE / this.size / 4));
  }

  embed(token: number, position: number): Numbers {
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

  norm(x: Numbers, name: string): Numbers {
    const { [`${name}.gamma`]: gamma, [`${name}.beta`]: beta } = this.parameters;
    return gamma ? normalize(x, gamma, beta, this.config.norm_eps) : x;
  }

  // Logits (T, V) of rows of the residual stream, (T, D).
  unembed(x: Numbers): Numbers {
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
export class Pass {
  readonly stream: Numbers[];
  readonly keys: Numbers[];
  readonly values: Numbers[];
  readonly weights: Numbers[];
  readonly losses: Numbers; // of the token after each position, in nats
  tokens: number[] = [];
  edits: Edits = new Map();
  private loads?: number;

  constructor(readonly model: Model) {
    const { n_blocks: L, d_model: D, n_heads: H, n_kv_heads: G, head_dim: K, value_dim: J, vocab_size: V, unembedding } = model.config;
    const N = model.maxTokens;
    const arrays = (n: number, width: (i: number) => number) => Array.from({ length: n }, (_, i) => new Float32Array(N * width(i)));
    this.stream = arrays(L + 1, (i) => (unembedding === "mlp" && i === L ? V : D));
    [this.keys, this.values] = [arrays(L, () => G * K), arrays(L, () => G * J)];
    this.weights = arrays(L, () => H * N);
    this.losses = new Float32Array(N);
  }

  // Read a text with some activations replaced: a head's output ("block.head") by null, which is zeros, or by an array
  // (T, J) for its first positions; the stream before a block at a position ("block@position") by an array (D). An array
  // that an edit holds must not change. Before each few positions, yield how many of how many are computed; what is
  // computed stays valid where the caller stops there. Return the number of positions.
  *read(tokens: number[], edits: Edits = new Map()): Generator<[number, number], number> {
    const { n_blocks: L } = this.model.config;
    const T = tokens.length;
    if (this.loads !== this.model.loads) [this.loads, this.tokens] = [this.model.loads, []];
    let valid = 0;
    while (valid < T && valid < this.tokens.length && tokens[valid] === this.tokens[valid]) valid++;
    const changed = [...edits, ...this.edits].map(([name]) => name).filter((name) => edits.get(name) !== this.edits.get(name));
    const block = Math.min(L, ...changed.map((name) => Math.max(0, parseInt(name) - Number(name.includes("@"))))); // that writes it
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

  private computeLosses(first: number, last: number): void {
    if (first === last) return;
    const width = this.width(this.model.config.n_blocks);
    const logits = this.model.unembed(this.stream.at(-1)!.subarray(first * width, last * width));
    const V = logits.length / (last - first);
    for (let t = first; t < last; t++) {
      const row = logits.subarray((t - first) * V, (t - first + 1) * V);
      this.losses[t] = -logProbability(row, this.tokens[t + 1]);
    }
  }

  // Compute the positions from `first` up to `last`, from a block on.
  private compute(first: number, last: number, block: number): void {
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

  private editStream(block: number, first: number, last: number): void {
    for (let t = first; t < last && this.edits.size; t++) {
      const row = this.edits.get(`${block}@${t}`);
      if (row) this.stream[block].set(row, t * row.length);
    }
  }

  // Compute the residual stream after a block, of the positions from `first` up to `last`.
  computeBlock(i: number, first: number, last: number): void {
    const { d_model: D } = this.model.config;
    const x = computeBlock(new Rows(this, i, first, last), this.model.config, this.stream[i].subarray(first * D, last * D));
    this.stream[i + 1].set(x, (first * x.length) / (last - first));
  }

  // Logits (V) after a position; after `block` blocks only, unembedded as if it were the last (logit lens).
  logits(position: number, block = this.model.config.n_blocks): Numbers {
    const width = this.width(block);
    return this.model.unembed(this.stream[block].subarray(position * width, (position + 1) * width));
  }

  // Logits (L + 1, V) after a position and none, one … all blocks.
  lens(position: number): Numbers {
    const { n_blocks: L, d_model: D } = this.model.config;
    const x = new Float32Array((L + 1) * D);
    this.stream.forEach((rows, block) => x.set(rows.subarray(position * D, (position + 1) * D), block * D));
    return this.model.unembed(x);
  }

  // Width of the residual stream before a block.
  width(block: number): number {
    return this.stream[block].length / this.model.maxTokens;
  }

  // Attention weights (T) of a head from a position.
  row(block: number, head: number, position: number): Numbers {
    const start = (head * this.model.maxTokens + position) * this.model.maxTokens;
    return this.weights[block].subarray(start, start + this.tokens.length);
  }

  // Outputs (T, J) of a head: the sums of the values by its attention weights.
  output(block: number, head: number): Numbers {
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

  loss(): number {
    const losses = this.losses.subarray(0, Math.max(0, this.tokens.length - 1));
    return losses.reduce((a, b) => a + b, 0) / losses.length;
  }
}

// The operations of a block on rows of numbers, of the positions from `first` up to `last`, as a pass has them.
export class Rows implements Operations<Numbers> {
  constructor(
    readonly pass: Pass,
    readonly i: number,
    readonly first: number,
    readonly last: number,
  ) {}

  parameter(name: string): Numbers | undefined {
    return this.pass.model.parameters[`blocks_${this.i}.${name}`];
  }

  has(name: string): boolean {
    return Boolean(this.parameter(name));
  }

  norm(x: Numbers, name: string): Numbers {
    return this.pass.model.norm(x, `blocks_${this.i}.${name}`);
  }

  linear(x: Numbers, layer: string, name: string): Numbers {
    const [W, b] = ["W", "b"].map((kind) => this.parameter(`${layer}.${kind}_${name}`));
    return this.pass.model.matmul.linear(x, W!, b ?? null, x.length / (this.last - this.first));
  }

  add(x: Numbers, y: Numbers): Numbers {
    return x.map((value, i) => value + y[i]);
  }

  activate(h: Numbers, gate?: Numbers): Numbers {
    const act = ACTIVATIONS[this.pass.model.config.activation];
    return gate ? h.map((value, i) => act(gate[i]) * value) : h.map((value) => act(value));
  }

  // Queries, keys and values of the given width in each head; keys and values are those of the cache from now on.
  place(x: Numbers, kind: "Q" | "K" | "V"): Numbers {
    const { pass, i, first } = this;
    const { n_kv_heads: G, head_dim: K, value_dim: J, frequencies, qk_eps, embedding_scale } = pass.model.config;
    if (kind === "V") {
      const table = pass.model.parameters["value_embedding.W_E"];
      const token = (j: number) => pass.tokens[first + Math.floor(j / (G * J))];
      if (table) x = x.map((value, j) => value + embedding_scale * table[token(j) * G * J + (j % (G * J))]);
      pass.values[i].set(x, first * G * J);
      return x;
    }
    const gamma = this.parameter(`attention.gamma_${kind}`);
    if (gamma) x = normalize(x, gamma, null, qk_eps);
    const n = x.length / K / (this.last - first); // heads
    if (frequencies[i]) x = turn(x.slice(), frequencies[i], K, first, n);
    if (kind === "K") pass.keys[i].set(x, first * G * K);
    return x;
  }

  // The keys and values are those of the cache: of all positions up to a query's own.
  attend(q: Numbers): Numbers {
    const { pass, i, first, last } = this;
    const { model, keys, values, weights, edits } = pass;
    const { n_heads: H, n_kv_heads: G, head_dim: K, value_dim: J, windows, scale } = model.config;
    const [N, z] = [model.maxTokens, new Float32Array((last - first) * H * J)];
    for (let position = first; position < last; position++) {
      const start = Math.max(0, position - windows[i] + 1);
      for (let h = 0; h < H; h++) {
        const [own, group] = [(position - first) * H + h, Math.floor(h / (H / G))];
        const scores = new Float64Array(position + 1 - start);
        for (let s = start; s <= position; s++) {
          let sum = 0;
          for (let k = 0, at = (s * G + group) * K; k < K; k++) sum += q[own * K + k] * keys[i][at + k];
          scores[s - start] = scale * sum;
        }
        const row = softmax(scores);
        weights[i].subarray((h * N + position) * N, (h * N + position + 1) * N).fill(0).set(row, start);
        const edit = edits.get(`${i}.${h}`);
        if (edit === null) continue;
        if (edit && position < edit.length / J) {
          z.set(edit.subarray(position * J, (position + 1) * J), own * J);
          continue;
        }
        for (let s = start; s <= position; s++) {
          for (let j = 0, at = (s * G + group) * J; j < J; j++) z[own * J + j] += row[s - start] * values[i][at + j];
        }
      }
    }
    return z;
  }

  merge(z: Numbers): Numbers {
    if (this.has("attention.W_O")) return this.linear(z, "attention", "O");
    const { d_model: D, n_heads: H, value_dim: J } = this.pass.model.config;
    if (H * J === D) return z;
    const sum = new Float32Array((this.last - this.first) * D); // of heads as wide as the model
    z.forEach((x, i) => (sum[Math.floor(i / (H * J)) * D + (i % D)] += x));
    return sum;
  }
}
