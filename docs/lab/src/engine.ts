// Training in the browser, measured step by step.
import { Array as NDArray, init as initDevices, jit, numpy as np, random, tree, valueAndGrad } from "@jax-js/jax";
import { crossEntropy, forward, init, keyOf, makeMasks, type Inside, type Masks, type Params } from "./model";
import { encode, split, type Split } from "./text";

export { theory } from "./theory";

export type Fault =
  | "no mask"
  | "mask after softmax"
  | "unscaled scores"
  | "N(0, 1) weights"
  | "no residual"
  | "no norm"
  | "softmax over queries"
  | "no positions"
  | "large learning rate";

export interface Config {
  contextLength: number;
  width: number;
  heads: number;
  blocks: number;
  hidden: number;
  batchSize: number;
  learningRate: number;
  momentum: number;
  seed: number;
  faults: Fault[];
}

export const DEFAULT_CONFIG: Config = {
  contextLength: 32,
  width: 64,
  heads: 4,
  blocks: 2,
  hidden: 256,
  batchSize: 16,
  learningRate: 0.05,
  momentum: 0.9,
  seed: 0,
  faults: [],
};

/** Factor of the fault "large learning rate". */
export const LARGE_LEARNING_RATE = 10;

/** The beginning of the library's default corpus. */
export { default as DEFAULT_TEXT } from "../text.txt";

/** Euclidean norms of a parameter, of its gradient and of its last change. */
export interface Matrix {
  name: string;
  shape: number[];
  weight: number;
  gradient: number;
  update: number;
}

export interface Progress {
  step: number;
  /** Mean over the batch in nats per character, before the update, like all but `heldOut`, `update` and `finite`. */
  loss: number;
  heldOut: number;
  /** Mean entropy in nats of the attention weights of a query, divided by their sum if it is not 1; [block][head]. */
  entropy: number[][];
  /** Variance of the scores of visible keys, [block][head]. */
  scoreVariance: number[][];
  matrices: Matrix[];
  finite: boolean;
}

/**
 * What attention computes: [block][head][query][key], and [block][head][position][K].
 *
 * The scores are those that the softmax receives, but without the mask; the pattern is what multiplies the values.
 */
export interface Look {
  tokens: number[];
  pattern: number[][][][];
  attn_scores: number[][][][];
  q: number[][][][];
  k: number[][][][];
  v: number[][][][];
}

export interface Lab {
  readonly config: Config;
  readonly vocabulary: string[];
  readonly step: number;
  /** Parameters stay; "N(0, 1) weights" acts when they are drawn, by `reset`. */
  setFaults(faults: Fault[]): void;
  /** Train, and measure at the last of these steps, or at the first with a number that is not finite, where it ends. */
  train(steps: number): Promise<Progress>;
  /** Windows of a step, tokens and then targets in each: (B, T + 1). A function of the text, the seed and the step. */
  batch(step: number): number[][];
  look(text: string): Look;
  generate(prompt: string, tokens: number, temperature: number): string;
  /** Gradient of the last batch's loss, row-major. */
  gradient(name: string): number[];
  /** Parameter, row-major. */
  parameter(name: string): number[];
  reset(): void;
  /** Free the memory of the parameters; nothing else may be called after it. */
  dispose(): void;
}

export interface Theory {
  /** Held-out losses in nats per character of models that only count: none, characters, and pairs of characters. */
  uniform: number;
  unigram: number;
  bigram: number;
  /**
   * Mean entropy in nats of each block's attention before training, if the features of different positions were
   * independent. They are not in the later blocks without residual connections, where heads attend more evenly.
   */
  entropyAtStart: number[];
}

/** Create a model of the text's characters. Throws an `Error` with one sentence for a text or a config that cannot be. */
export async function createLab(config: Config, text: string): Promise<Lab> {
  if (config.width % config.heads) {
    throw new Error(`The width ${config.width} is not a multiple of ${config.heads} heads; choose another number.`);
  }
  await initDevices("wasm");
  return new Trainer(config, split(config, text));
}

type Named = { name: string; shape: number[]; data: Float32Array };
type Step = { loss: NDArray; gradient: Params; params: Params; velocity: Params };

class Trainer implements Lab {
  step = 0;
  private params!: Params;
  private velocity!: Params;
  private last?: Progress;
  private lastGradient: Named[] = [];
  private compiled: ReturnType<typeof compile>;

  constructor(
    public config: Config,
    private data: Split,
  ) {
    this.compiled = compile(config);
    this.reset();
  }

  get vocabulary(): string[] {
    return this.data.vocabulary;
  }

  setFaults(faults: Fault[]): void {
    this.config = { ...this.config, faults };
    this.compiled = compile(this.config);
  }

  dispose(): void {
    tree.dispose([this.params, this.velocity]);
  }

  reset(): void {
    tree.dispose([this.params ?? [], this.velocity ?? []]);
    this.params = init(this.config, this.vocabulary.length);
    this.velocity = tree.map((x: NDArray) => np.zeros(x.shape), this.params) as Params;
    this.last = undefined;
    this.lastGradient = [];
    this.step = 0;
  }

  async train(steps: number): Promise<Progress> {
    for (let i = 1; this.last?.finite !== false; i++) {
      const before = tree.ref(this.params);
      const { loss, gradient } = this.advance();
      const finite = isFinite(loss, this.params);
      if (i >= steps || !finite) return (this.last = { ...this.measure(before, loss, gradient), finite });
      loss.dispose();
      tree.dispose([before, gradient]);
      await pause();
    }
    return this.last;
  }

  batch(step: number): number[][] {
    const { contextLength: T, batchSize: B } = this.config;
    const { training } = this.data;
    const bits: number[] = random.bits(keyOf(this.config, step + 1), [B]).js();
    return bits.map((n) => n % (training.length - T)).map((start) => training.slice(start, start + T + 1));
  }

  look(text: string): Look {
    const { tokens, insides, logits } = this.run(encode(this.vocabulary, text));
    logits.dispose();
    const n = tokens.length;
    const heads = (name: keyof Inside) =>
      insides.map((inside) => (inside[name].js() as number[][][]).map((head) => head.slice(0, n)));
    const maps = (name: "pattern" | "attn_scores") =>
      heads(name).map((block) => block.map((head) => head.map((row) => row.slice(0, n))));
    return {
      tokens,
      pattern: maps("pattern"),
      attn_scores: maps("attn_scores"),
      q: heads("q"),
      k: heads("k"),
      v: heads("v"),
    };
  }

  generate(prompt: string, count: number, temperature: number): string {
    const ids = encode(this.vocabulary, prompt);
    const start = ids.length;
    for (let i = 0; i < count; i++) {
      const { tokens, insides, logits } = this.run(ids);
      tree.dispose(insides);
      ids.push(sample((logits.js() as number[][])[tokens.length - 1], temperature, keyOf(this.config, i + 1)));
    }
    return ids.slice(start).map((id) => this.vocabulary[id]).join("");
  }

  gradient(name: string): number[] {
    return rowOf(this.lastGradient, name);
  }

  parameter(name: string): number[] {
    return rowOf(rows(this.params), name);
  }

  /** Take one step. */
  private advance(): { loss: NDArray; gradient: Params } {
    const [tokens, targets] = pairs(this.batch(this.step));
    const masks = this.masks(this.config.contextLength);
    const { params, velocity, ...rest } = this.compiled.step(this.params, this.velocity, tokens, targets, masks);
    [this.params, this.velocity] = [params, velocity];
    this.step += 1;
    return rest;
  }

  /** Measure the step that has just been taken from these parameters. */
  private measure(params: Params, loss: NDArray, gradient: Params): Omit<Progress, "finite"> {
    const masks = () => this.masks(this.config.contextLength);
    const [tokens, targets] = pairs(this.batch(this.step - 1));
    targets.dispose();
    const before = rows(params);
    const after = rows(this.params);
    this.lastGradient = rows(gradient);
    tree.dispose(gradient);
    const matrices = before.map(({ name, shape, data }, i) => ({
      name,
      shape,
      weight: norm(data),
      gradient: norm(this.lastGradient[i].data),
      update: norm(data.map((x, j) => after[i].data[j] - x)),
    }));
    const probed = this.compiled.probe(params, tokens, masks());
    const heldOut = this.compiled.loss(tree.ref(this.params), ...pairs(this.data.heldOut), masks());
    return {
      step: this.step,
      loss: loss.js(),
      heldOut: heldOut.js(),
      entropy: probed.map(({ entropy }) => entropy.js()),
      scoreVariance: probed.map(({ variance }) => variance.js()),
      matrices,
    };
  }

  private masks(length: number): Masks {
    return makeMasks(this.config.contextLength, length, this.config.faults);
  }

  /** Run the model on the last tokens, at most a context, or on the first character of the vocabulary for none. */
  private run(ids: number[]): { tokens: number[]; logits: NDArray; insides: Inside[] } {
    const T = this.config.contextLength;
    const tokens = ids.length ? ids.slice(-T) : [0];
    const padded = np.array([...tokens, ...Array<number>(T - tokens.length).fill(0)], { dtype: np.int32 });
    const [logits, insides] = this.compiled.look(tree.ref(this.params), padded, this.masks(tokens.length));
    return { tokens, logits, insides };
  }
}

const compiled = new Map<string, ReturnType<typeof jitted>>();

/** Return the jitted functions of a config, made once: jax-js keeps some memory of each function for ever. */
function compile({ learningRate, momentum, faults }: Config) {
  const key = JSON.stringify([learningRate, momentum, [...faults].sort()]);
  if (!compiled.has(key)) compiled.set(key, jitted(learningRate, momentum, faults));
  return compiled.get(key)!;
}

function jitted(learningRate: number, momentum: number, faults: Fault[]) {
  const rate = learningRate * (faults.includes("large learning rate") ? LARGE_LEARNING_RATE : 1);
  const lossOf = (params: Params, tokens: NDArray, targets: NDArray, masks: Masks): NDArray => {
    const [logits, insides] = forward(params, tokens, masks, faults);
    tree.dispose(insides);
    return crossEntropy(logits, targets);
  };
  const step = jit((params: Params, velocity: Params, tokens: NDArray, targets: NDArray, masks: Masks): Step => {
    const [loss, gradient] = valueAndGrad(lossOf)(tree.ref(params), tokens, targets, masks);
    // Nesterov SGD in the form of PyTorch and optax, as in the ladder.
    const next = tree.map((v: NDArray, g: NDArray) => v.mul(momentum).add(g), velocity, tree.ref(gradient)) as Params;
    const moved = tree.map(
      (p: NDArray, v: NDArray, g: NDArray) => p.sub(v.mul(momentum).add(g).mul(rate)),
      params,
      tree.ref(next),
      tree.ref(gradient),
    ) as Params;
    return { loss, gradient, params: moved, velocity: next };
  });
  const loss = jit(lossOf);
  const look = jit((params: Params, tokens: NDArray, masks: Masks) => forward(params, tokens, masks, faults));
  const probe = jit((params: Params, tokens: NDArray, masks: Masks) => {
    const visible = np.where(masks.after.ref, 1, 0);
    const [logits, insides] = forward(params, tokens, masks, faults);
    logits.dispose();
    const measured = insides.map(({ q, k, v, attn_scores, pattern }) => {
      tree.dispose([q, k, v]);
      return { entropy: entropy(pattern), variance: variance(attn_scores, visible.ref) };
    });
    visible.dispose();
    return measured;
  });
  return { step, loss, look, probe };
}

/** Return the mean entropy in nats of the rows of each head, divided by their sums, (H,), with 0 · log 0 = 0. */
function entropy(weights: NDArray): NDArray {
  const sums = weights.ref.sum(-1, { keepdims: true });
  const shares = weights.div(np.where(sums.ref.greater(0), sums, 1));
  const logs = np.log(np.where(shares.ref.greater(1e-30), shares.ref, 1)); // that of a subnormal number is infinite
  return shares.mul(logs).sum(-1).neg().mean([0, 2]);
}

/** Return the variance of the visible scores of each head, (H,). */
function variance(scores: NDArray, visible: NDArray): NDArray {
  const count = visible.ref.sum().mul(scores.shape[0]);
  const mean = (x: NDArray) => x.mul(visible.ref).sum([0, 2, 3]).div(count.ref);
  const center = mean(scores.ref).reshape([1, -1, 1, 1]);
  const result = mean(np.square(scores.sub(center)));
  visible.dispose();
  count.dispose();
  return result;
}

function pairs(windows: number[][]): [NDArray, NDArray] {
  const part = (from: number, to?: number) =>
    np.array(windows.map((row) => row.slice(from, to)), { dtype: np.int32 });
  return [part(0, -1), part(1)];
}

function sample(logits: number[], temperature: number, key: NDArray): number {
  const [best, at] = [Math.max(...logits), logits.indexOf(Math.max(...logits))];
  const u: number = random.uniform(key).js();
  if (!temperature || Number.isNaN(best)) return Math.max(at, 0);
  const odds = logits.map((x) => Math.exp((x - best) / temperature));
  let rest = u * odds.reduce((sum, x) => sum + x, 0);
  const chosen = odds.findIndex((x) => (rest -= x) < 0);
  return chosen < 0 ? at : chosen;
}

/** Return the parameters by the library's dotted names, heads apart: `blocks.0.attention.heads.1.W_Q`. */
function rows(params: Params): Named[] {
  const named: Named[] = [];
  const walk = (node: object, path: string[]) => {
    for (const [key, value] of Object.entries(node)) {
      if (value instanceof NDArray) named.push(...heads([...path, key], value));
      else walk(value, [...path, key]);
    }
  };
  walk(params, []);
  return named;
}

function heads(path: string[], x: NDArray): Named[] {
  const data = x.ref.dataSync() as Float32Array;
  if (x.ndim < 3) return [{ name: path.join("."), shape: x.shape, data }];
  const [parent, name] = [path.slice(0, -1).join("."), path[path.length - 1]];
  const isOutput = name === "W_O"; // (H, K, D); the others are (D, H, K)
  const [H, K, D] = isOutput ? x.shape : [x.shape[1], x.shape[2], x.shape[0]];
  return Array.from({ length: H }, (_, h) => ({
    name: `${parent}.heads.${h}.${name}`,
    shape: isOutput ? [K, D] : [D, K],
    data: isOutput ? data.slice(h * K * D, (h + 1) * K * D) : data.filter((_, i) => Math.floor(i / K) % H === h),
  }));
}

function rowOf(named: Named[], name: string): number[] {
  const row = named.find((row) => row.name === name);
  if (!row) throw new Error(`There is no matrix ${name}, or no step has been taken.`);
  return [...row.data];
}

function isFinite(loss: NDArray, params: Params): boolean {
  const arrays = [loss, ...tree.leaves(params)] as NDArray[];
  return arrays.every((x) => x.ref.dataSync().every(Number.isFinite));
}

function norm(x: Float32Array): number {
  return Math.sqrt(x.reduce((sum, y) => sum + y * y, 0));
}

/** Let the browser draw and listen. */
function pause(): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve));
}
