// The rung `head_scale` of the ladder, and what each switch breaks in it.
//
// One letter per axis, as in the library: T queries, S keys, D width, H heads, K width of a head, F hidden width,
// V vocabulary; `…` is a batch, or nothing. jax-js frees an array that a function has taken: `x.ref` keeps x for one
// more use.
import { nn, numpy as np, random, tree, type Array as NDArray } from "@jax-js/jax";
import { block, type Operations, type Wiring } from "./decoder";
import type { Config, Fault } from "./engine";

type Attention = { W_Q: NDArray; W_K: NDArray; W_V: NDArray; W_O: NDArray };
type MLP = { W_1: NDArray; b_1: NDArray; W_2: NDArray; b_2: NDArray };
type Norm = { gamma: NDArray };
type Block = { attention_norm: Norm; attention: Attention; mlp_norm: Norm; mlp: MLP };
export type Params = { embedding: { W_E: NDArray; W_pos: NDArray }; blocks: Block[]; W_out: NDArray };

/** Keys (T, S) that a query may attend to: those of the softmax, and those whose weights remain after it. */
export type Masks = { before: NDArray; after: NDArray };

/** What attention computes in one block, by the library's names: q, k, v (…, H, T, K), the others (…, H, T, S). */
export type Inside = { q: NDArray; k: NDArray; v: NDArray; attn_scores: NDArray; pattern: NDArray };

const EPSILON = 1e-6;
const MASKED = -3.4028234663852886e38; // finite, so that a row without a visible key does not become NaN

/** Return the masks of the first `length` of T positions. */
export function makeMasks(T: number, length: number, faults: Fault[]): Masks {
  const mask = (isVisible: (query: number, key: number) => boolean) =>
    np.array(Array.from({ length: T }, (_, t) => Array.from({ length: T }, (_, s) => isVisible(t, s))));
  const all = (t: number, s: number) => t < length && s < length;
  const causal = (t: number, s: number) => all(t, s) && s <= t;
  const after = faults.includes("no mask") ? all : causal;
  return { before: mask(faults.includes("mask after softmax") ? all : after), after: mask(after) };
}

/** Return the key of the parameters, for index 0, or that of an index after it. */
export function keyOf({ seed }: Config, index: number): NDArray {
  return random.key((seed * 2 ** 20 + index) % 2 ** 32);
}

/** Draw the parameters: a function of the seed. */
export function init(config: Config, V: number): Params {
  const { contextLength: T, width: D, heads: H, hidden: F, blocks: L } = config;
  const K = D / H;
  const keys = random.split(keyOf(config, 0), 3 + 8 * L);
  let drawn = 0;
  const normal = (shape: number[], std: number) => random.normal(keys.ref.slice(drawn++), shape).mul(std);
  const uniform = (shape: number[], fanIn: number) => {
    const bound = fanIn ** -0.5;
    return random.uniform(keys.ref.slice(drawn++), shape, { minval: -bound, maxval: bound });
  };
  const std = config.faults.includes("N(0, 1) weights") ? 1 : D ** -0.5;
  const params: Params = {
    embedding: { W_E: normal([V, D], 1), W_pos: normal([T, D], 1) },
    W_out: normal([D, V], D ** -0.5),
    blocks: Array.from({ length: L }, () => ({
      attention_norm: { gamma: np.ones([D]) },
      attention: {
        W_Q: normal([D, H, K], std),
        W_K: normal([D, H, K], std),
        W_V: normal([D, H, K], std),
        W_O: normal([H, K, D], std),
      },
      mlp_norm: { gamma: np.ones([D]) },
      mlp: { W_1: uniform([D, F], D), b_1: uniform([F], D), W_2: uniform([F, D], F), b_2: uniform([D], F) },
    })),
  };
  keys.dispose();
  return params;
}

/** Return the logits (…, T, V) of tokens (…, T), and what the attention of each block computes. */
export function forward(params: Params, tokens: NDArray, masks: Masks, faults: Fault[]): [NDArray, Inside[]] {
  const { embedding, blocks, W_out } = params;
  const wiring: Wiring = { norm_placement: "pre", residual: !faults.includes("no residual") };
  let x = np.matmul(nn.oneHot(tokens, embedding.W_E.shape[0]), embedding.W_E);
  if (faults.includes("no positions")) embedding.W_pos.dispose();
  else x = x.add(embedding.W_pos);
  const insides = blocks.map((parameters) => {
    const ops = new Arrays(parameters, masks, faults);
    x = ops.finish(block(ops, wiring, ops.keep(x)));
    return ops.inside;
  });
  masks.before.dispose();
  masks.after.dispose();
  return [np.matmul(x, W_out), insides];
}

/** Operations on jax-js arrays (…, T, D), and (…, H, T, K) of heads; they are freed, and so are the parameters, at the end. */
class Arrays implements Operations<NDArray> {
  inside!: Inside;
  private kept: NDArray[] = [];

  constructor(
    private parameters: Block,
    private masks: Masks,
    private faults: Fault[],
  ) {}

  keep(x: NDArray): NDArray {
    this.kept.push(x);
    return x;
  }

  /** Return a result, and free all others. */
  finish(x: NDArray): NDArray {
    const result = x.ref;
    tree.dispose([this.kept, this.parameters]);
    return result;
  }

  private parameter(layer: keyof Block, name: string): NDArray {
    return (this.parameters[layer] as Record<string, NDArray>)[name];
  }

  has(name: string): boolean {
    const [layer, parameter] = name.split(".");
    return parameter in this.parameters[layer as keyof Block];
  }

  norm(x: NDArray, name: keyof Block): NDArray {
    if (this.faults.includes("no norm")) return x;
    const meanSquare = np.mean(np.square(x.ref), -1, { keepdims: true });
    return this.keep(x.ref.div(np.sqrt(meanSquare.add(EPSILON))).mul(this.parameter(name, "gamma").ref));
  }

  linear(x: NDArray, layer: keyof Block, name: string): NDArray {
    const [W, b] = [this.parameter(layer, `W_${name}`), this.parameter(layer, `b_${name}`)];
    if (W.ndim === 3) return this.keep(np.einsum("...td,dhk->...htk", x.ref, W.ref));
    const y = np.matmul(x.ref, W.ref);
    return this.keep(b ? y.add(b.ref) : y);
  }

  add(x: NDArray, y: NDArray): NDArray {
    return this.keep(x.ref.add(y.ref));
  }

  activate(h: NDArray): NDArray {
    return this.keep(nn.relu(h.ref));
  }

  place(x: NDArray): NDArray {
    return x;
  }

  attend(q: NDArray, k: NDArray, v: NDArray): NDArray {
    const { masks, faults } = this;
    const scale = faults.includes("unscaled scores") ? 1 : q.shape[q.ndim - 1] ** -0.5;
    const attn_scores = np.einsum("...htk,...hsk->...hts", q.ref.mul(scale), k.ref);
    const axis = faults.includes("softmax over queries") ? -2 : -1;
    const shares = nn.softmax(np.where(masks.before.ref, attn_scores.ref, MASKED), axis);
    const pattern = np.where(masks.after.ref, shares, 0);
    this.inside = { q: q.ref, k: k.ref, v: v.ref, attn_scores, pattern };
    return this.keep(np.einsum("...hts,...hsk->...htk", pattern.ref, v.ref));
  }

  merge(z: NDArray): NDArray {
    return this.keep(np.einsum("...htk,hkd->...td", z.ref, this.parameter("attention", "W_O").ref));
  }
}

/** Return the mean negative log-likelihood of the targets (…, T) in nats. */
export function crossEntropy(logits: NDArray, targets: NDArray): NDArray {
  const chosen = nn.oneHot(targets, logits.shape[logits.ndim - 1]);
  return nn.logSoftmax(logits, -1).mul(chosen).sum(-1).mean().neg();
}
