// What the counts of characters predict, without any attention.
import type { Config, Theory } from "./engine";
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
  const total = training.length + V;
  const before = Array.from({ length: V }, (_, a) => pairs.subarray(a * V, (a + 1) * V).reduce((sum, n) => sum + n, 0));
  const targets = heldOut.flatMap((window) => window.slice(1).map((token, i) => [window[i], token]));
  const mean = (loss: (before: number, token: number) => number) =>
    targets.reduce((sum, [a, b]) => sum + loss(a, b), 0) / targets.length;
  return {
    uniform: Math.log(V),
    unigram: mean((_, b) => -Math.log(single[b] / total)),
    // A pair's count, and one more that is spread like the characters.
    bigram: mean((a, b) => -Math.log((pairs[a * V + b] + single[b] / total) / (before[a] + 1))),
    entropyAtStart: [],
  };
}
