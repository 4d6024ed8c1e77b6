// What can be known before training.
import type { Config, Fault, Theory } from "./engine";
import { split } from "./text";

/** Losses of three models that only count, from the training part, on the targets that `Progress.heldOut` averages. */
export function theory(config: Config, text: string): Theory {
  const { vocabulary, training, heldOut } = split(config, text);
  const V = vocabulary.length;
  const single = new Float64Array(V).fill(1); // one more than seen, so that no character is impossible
  const pairs = new Float64Array(V * V);
  training.forEach((token, i) => {
    single[token] += 1;
    if (i) pairs[training[i - 1] * V + token] += 1;
  });
  const share = (b: number) => single[b] / (training.length + V);
  const before = Array.from({ length: V }, (_, a) => total([...pairs.subarray(a * V, (a + 1) * V)]));
  const targets = heldOut.flatMap((window) => window.slice(1).map((token, i) => [window[i], token]));
  const mean = (loss: (before: number, token: number) => number) =>
    total(targets.map(([a, b]) => loss(a, b))) / targets.length;
  return {
    uniform: Math.log(V),
    unigram: mean((_, b) => -Math.log(share(b))),
    // A pair's count, and one more that is spread like the characters.
    bigram: mean((a, b) => -Math.log((pairs[a * V + b] + share(b)) / (before[a] + 1))),
    entropyAtStart: entropyAtStart(config),
  };
}

const SAMPLES = 48;

/** Return the mean entropy of each block's attention, averaged over matrices of random scores. */
function entropyAtStart({ contextLength: T, width: D, heads, blocks, faults }: Config): number[] {
  const has = (fault: Fault) => faults.includes(fault);
  const gain = has("N(0, 1) weights") ? D : 1; // of the variance, by each of W_Q, W_K, W_V and W_O
  const scoreVariance = gain ** 2 * (has("unscaled scores") ? D / heads : 1);
  const normal = normals();
  let stream = new Array<number>(T).fill(has("no positions") ? 1 : 2); // variance of the features of each position
  const add = (change: number[]) => (stream = has("no residual") ? change : stream.map((v, t) => v + change[t]));
  return Array.from({ length: blocks }, () => {
    const input = () => (has("no norm") ? stream : stream.map(() => 1));
    const [x, y] = [input(), new Array<number>(T).fill(0)];
    let entropy = 0;
    for (let i = 0; i < SAMPLES; i++) {
      const scores = x.map((v) => x.map((w) => Math.sqrt(scoreVariance * v * w) * normal()));
      weigh(scores, faults).forEach((row, t) => {
        const sum = total(row) || 1; // a row may underflow to zeros
        entropy -= total(row.map((w) => w && (w / sum) * Math.log(w / sum))) / (SAMPLES * T);
        y[t] += (gain ** 2 * total(row.map((w, s) => w * w * x[s]))) / SAMPLES;
      });
    }
    add(y);
    // The weights of a linear layer with n inputs have variance 1 / 3n, and ReLU keeps half of the squares.
    add(input().map((v) => v / 18));
    return entropy;
  });
}

/** Return the attention weights (T, S) of scores. */
function weigh(scores: number[][], faults: Fault[]): number[][] {
  const isVisible = (t: number, s: number) => s <= t || faults.includes("no mask");
  const mask = (x: number[][], hidden: number) => x.map((row, t) => row.map((y, s) => (isVisible(t, s) ? y : hidden)));
  const masked = faults.includes("mask after softmax") ? scores : mask(scores, -Infinity);
  const byQuery = faults.includes("softmax over queries");
  return mask(byQuery ? transpose(transpose(masked).map(softmax)) : masked.map(softmax), 0);
}

function softmax(x: number[]): number[] {
  const largest = Math.max(...x);
  const powers = x.map((y) => Math.exp(y - largest));
  const sum = total(powers);
  return powers.map((y) => y / sum);
}

function transpose(x: number[][]): number[][] {
  return x[0].map((_, j) => x.map((row) => row[j]));
}

function total(x: number[]): number {
  return x.reduce((sum, y) => sum + y, 0);
}

/** Return a function that draws from the standard normal distribution, the same numbers each time. */
function normals(): () => number {
  let state = 1;
  const uniform = () => (state = (state * 48271) % 2147483647) / 2147483647; // Park and Miller 1993
  return () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
}
