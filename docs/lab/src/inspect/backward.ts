import { attention, mlp, sublayer, type Operations } from "../decoder";
import { ACTIVATIONS, erf, PRODUCTS_AT_ONCE, Rows, sigmoid, softmax, turn, type Model, type Pass } from "./decoder";

// The gradient of a log-probability, by hand: each operation of a decoder on rows also notes how the gradient of what it
// returns becomes that of what it receives. Axes are named as in `decoder.ts`; d before a name, and a node's d, mean the
// gradient. Parameters get none.

type Numbers = Float32Array;

const plus = (x: Numbers, y: Numbers) => x.map((value, i) => value + y[i]);

export function dot(x: ArrayLike<number>, y: ArrayLike<number>): number {
  let sum = 0;
  for (let i = 0; i < x.length; i++) sum += x[i] * y[i];
  return sum;
}

// y = γ n + β with n = (x - mean) · scale, so dx = scale (g - mean(g) - n mean(g n)) with g = γ dy; without β, RMSNorm
// subtracts neither mean.
function normalizeBackward(x: Numbers, gamma: Numbers, beta: Numbers | null, eps: number, dy: Numbers): Numbers {
  const width = gamma.length;
  const dx = new Float32Array(x.length);
  for (let start = 0; start < x.length; start += width) {
    let mean = 0, meanG = 0;
    if (beta) {
      for (let i = 0; i < width; i++) {
        mean += x[start + i] / width;
        meanG += (gamma[i] * dy[start + i]) / width;
      }
    }
    let square = 0, product = 0;
    for (let i = 0; i < width; i++) {
      square += (x[start + i] - mean) ** 2 / width;
      product += (gamma[i] * dy[start + i] * (x[start + i] - mean)) / width;
    }
    const scale = 1 / Math.sqrt(square + eps);
    for (let i = 0; i < width; i++) {
      dx[start + i] = scale * (gamma[i] * dy[start + i] - meanG - scale * scale * (x[start + i] - mean) * product);
    }
  }
  return dx;
}

const geluSlope = (x: number) => {
  const [rate, tanh] = [Math.sqrt(2 / Math.PI), Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))];
  return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * rate * (1 + 3 * 0.044715 * x * x);
};
const geluExactSlope = (x: number) =>
  0.5 * (1 + erf(x * Math.SQRT1_2)) + (x * Math.exp(-0.5 * x * x)) / Math.sqrt(2 * Math.PI);
const siluSlope = (x: number) => sigmoid(x) * (1 + x * sigmoid(-x));
// Derivatives of `ACTIVATIONS`.
export const SLOPES: Record<keyof typeof ACTIVATIONS, (x: number) => number> = {
  relu: (x) => Number(x > 0),
  squared_relu: (x) => 2 * Math.max(0, x),
  gelu: geluSlope,
  gelu_exact: geluExactSlope,
  quick_gelu: (x) => sigmoid(1.702 * x) * (1 + 1.702 * x * sigmoid(-1.702 * x)),
  silu: siluSlope,
  swiglu: siluSlope,
  geglu: geluSlope,
  geglu_exact: geluExactSlope,
  tanh: (x) => 1 - Math.tanh(x) ** 2,
};

// Rows, and their gradient once what follows has received its own.
class Node {
  d: Numbers | null = null;

  constructor(readonly x: Numbers) {}

  receive(d: Numbers): void {
    this.d = this.d ? plus(this.d, d) : d;
  }
}

// Gradients of a block's keys and values, to which the queries add, and its heads' outputs, and gradient times output.
interface Sums {
  keys: Numbers;
  values: Numbers;
  heads: Numbers;
  effects: Float64Array;
}

// The operations of a block, which note their way back.
class Tape implements Operations<Node> {
  private steps: (() => void)[] = [];

  constructor(
    private rows: Rows,
    private sums: Sums,
  ) {}

  private note(x: Numbers, back: (d: Numbers) => void): Node {
    const node = new Node(x);
    this.steps.push(() => node.d && back(node.d));
    return node;
  }

  // Go back to the gradients of all that led to a node, from its own.
  back(node: Node, d: Numbers): void {
    node.receive(d);
    for (const step of this.steps.splice(0).reverse()) step();
  }

  has(name: string): boolean {
    return this.rows.has(name);
  }

  norm(node: Node, name: string): Node {
    const [gamma, beta] = ["gamma", "beta"].map((part) => this.rows.parameter(`${name}.${part}`));
    if (!gamma) return node;
    const { norm_eps } = this.rows.pass.model.config;
    const back = (d: Numbers) => node.receive(normalizeBackward(node.x, gamma, beta ?? null, norm_eps, d));
    return this.note(this.rows.norm(node.x, name), back);
  }

  // y = x Wᵀ + b, so dx = dy W.
  linear(node: Node, layer: string, name: string): Node {
    const { pass, first, last } = this.rows;
    const width = node.x.length / (last - first);
    const W = this.rows.parameter(`${layer}.W_${name}`)!;
    return this.note(this.rows.linear(node.x, layer, name), (d) => node.receive(pass.model.matmul.transposed(d, W, width)));
  }

  add(a: Node, b: Node): Node {
    return this.note(this.rows.add(a.x, b.x), (d) => {
      a.receive(d);
      b.receive(d);
    });
  }

  activate(h: Node, gate?: Node): Node {
    const [act, slope] = [ACTIVATIONS, SLOPES].map((table) => table[this.rows.pass.model.config.activation]);
    return this.note(this.rows.activate(h.x, gate?.x), (d) => {
      if (!gate) return h.receive(d.map((x, j) => x * slope(h.x[j])));
      h.receive(d.map((x, j) => x * act(gate.x[j])));
      gate.receive(d.map((x, j) => x * h.x[j] * slope(gate.x[j])));
    });
  }

  // The transpose of a rotation is the rotation backwards.
  place(node: Node, kind: "Q" | "K" | "V"): Node {
    const { pass, i, first, last } = this.rows;
    const { head_dim: K, frequencies, qk_eps } = pass.model.config;
    const rotation = frequencies[i];
    return this.note(this.rows.place(node.x, kind), (d) => {
      if (kind === "V") return node.receive(d);
      if (rotation) d = turn(d.slice(), rotation, K, first, d.length / K / (last - first), -1);
      const gamma = this.rows.parameter(`attention.gamma_${kind}`);
      node.receive(gamma ? normalizeBackward(node.x, gamma, null, qk_eps, d) : d);
    });
  }

  // head = Σ weight · value, and weights are a softmax: dscore = weight (dweight - Σ weight dweight). The gradients of a
  // position's keys and values are complete after the queries from it on, so the last rows come first.
  attend(q: Node, k: Node, v: Node): Node {
    const { rows, sums } = this;
    const { pass, i, first, last } = rows;
    const { n_heads: H, n_kv_heads: G, head_dim: K, value_dim: J, windows, scale } = pass.model.config;
    const [keys, values] = [pass.keys[i], pass.values[i]];
    return this.note(rows.attend(q.x), (dHeads) => {
      sums.heads.set(dHeads, first * H * J);
      const dq = new Float32Array(q.x.length);
      for (let position = first; position < last; position++) {
        const start = Math.max(0, position - windows[i] + 1);
        for (let h = 0; h < H; h++) {
          if (pass.edits.has(`${i}.${h}`)) continue;
          const [own, group] = [(position - first) * H + h, Math.floor(h / (H / G))];
          const weights = pass.row(i, h, position);
          const dHead = dHeads.subarray(own * J, (own + 1) * J);
          const dWeights = new Float64Array(position + 1);
          let effect = 0; // Σ weight dweight is also the gradient times the head's output
          for (let s = start; s <= position; s++) {
            for (let j = 0, at = (s * G + group) * J; j < J; j++) {
              dWeights[s] += dHead[j] * values[at + j];
              sums.values[at + j] += weights[s] * dHead[j];
            }
            effect += weights[s] * dWeights[s];
          }
          sums.effects[h] += effect;
          for (let s = start; s <= position; s++) {
            const dDot = scale * weights[s] * (dWeights[s] - effect);
            for (let k = 0, at = (s * G + group) * K; k < K; k++) {
              dq[own * K + k] += dDot * keys[at + k];
              sums.keys[at + k] += dDot * q.x[own * K + k];
            }
          }
        }
      }
      q.receive(dq);
      k.receive(sums.keys.subarray(first * G * K, last * G * K));
      v.receive(sums.values.subarray(first * G * J, last * G * J));
    });
  }

  merge(z: Node): Node {
    if (this.has("attention.W_O")) return this.linear(z, "attention", "O");
    const { pass, first, last } = this.rows;
    const { d_model: D, n_heads: H, value_dim: J } = pass.model.config;
    const ofHead = (d: Numbers) =>
      Float32Array.from({ length: (last - first) * H * J }, (_, n) => d[Math.floor(n / (H * J)) * D + (n % D)]);
    return this.note(this.rows.merge(z.x), (d) => z.receive(ofHead(d)));
  }
}

// The gradient of a token's log-probability after a row of the residual stream, with respect to the row.
function unembedBackward(model: Model, x: Numbers, token: number): Numbers {
  const { unembedding, d_model: D, logit_soft_cap: cap, norm_eps } = model.config;
  const { "final_norm.gamma": gamma, "final_norm.beta": beta } = model.parameters;
  const through = (d: Numbers) => (gamma ? normalizeBackward(x, gamma, beta, norm_eps, d) : d);
  const logits = model.unembed(x);
  const d = Float32Array.from(softmax(logits), (p, v) => Number(v === token) - p);
  if (unembedding === "mlp") return through(d);
  if (cap) logits.forEach((logit, v) => { d[v] *= 1 - (logit / cap) ** 2; });
  return through(model.matmul.transposed(d, model.parameters[unembedding === "tied" ? "embedding.W_E" : "W_out"], D));
}

export interface Gradient {
  embedding: Numbers;
  tokenValues: Numbers;
  heads: Numbers[];
  effects: { heads: Float64Array; attention: number; mlp: number }[];
}

// Gradients of log p(token) after a position of a pass, which is not changed: of the embedding at each position, (T, D),
// and of the token's own values, (T, G, J); of each block's heads, (T, H, J); and the gradient times the output of each
// head, attention layer and MLP, summed over positions. That is, to first order, what the log-probability would lose if
// the output were zero. Before each few positions, yield how many of how many are computed.
export function* backward(pass: Pass, position: number, token: number): Generator<[number, number], Gradient> {
  const { model } = pass;
  const { n_blocks: L, d_model: D, n_heads: H, n_kv_heads: G, head_dim: K, value_dim: J } = model.config;
  const T = position + 1;
  const few = 4 * Math.max(1, Math.floor((PRODUCTS_AT_ONCE * L) / model.size / 12)); // three products with each weight
  const tokenValues = new Float32Array(T * G * J);
  const heads: Numbers[] = [];
  const effects = Array.from({ length: L }, () => ({ heads: new Float64Array(H), attention: 0, mlp: 0 }));
  let width = pass.width(L);
  let d = new Float32Array(T * width);
  d.set(unembedBackward(model, pass.stream[L].slice(position * width, T * width), token), position * width);
  for (let i = L - 1; i >= 0; i--, width = D) {
    const sums = {
      keys: new Float32Array(T * G * K), values: new Float32Array(T * G * J), heads: new Float32Array(T * H * J),
      effects: effects[i].heads,
    };
    const dx = new Float32Array(T * D);
    for (let last = T, first; last > 0; last = first) {
      yield [(L - 1 - i) * T + T - last, L * T];
      first = Math.max(0, last - few);
      const tape = new Tape(new Rows(pass, i, first, last), sums);
      const x = new Node(pass.stream[i].slice(first * D, last * D));
      const outputs: [("attention" | "mlp"), Node][] = [];
      const part = (name: "attention" | "mlp", f: typeof attention) => (ops: Operations<Node>, x: Node) => {
        const y = f(ops, x);
        outputs.push([name, y]);
        return y;
      };
      const middle = sublayer(tape, model.config, "attention", x, part("attention", attention));
      const y = sublayer(tape, model.config, "mlp", middle, part("mlp", mlp));
      tape.back(y, d.subarray(first * width, last * width));
      for (const [name, y] of outputs) effects[i][name] += dot(y.d!, y.x);
      dx.set(x.d!, first * D);
    }
    d = dx;
    heads[i] = sums.heads;
    sums.values.forEach((value, n) => { tokenValues[n] += value; });
  }
  return { embedding: d, tokenValues, heads, effects };
}
