import { softmax, type Pass } from "./decoder";

// Long computations in parts, and tokens chosen from what they return.

/** Most characters of a text that is typed or pasted: a browser takes a second to lay out tens of thousands of lines. */
export const LONGEST_TEXT = 4096;
/** Milliseconds of computing after which the page goes on. */
export const TASK_MS = 50;

// The n indices of the largest values, in descending order.
export function largest(values: ArrayLike<number>, n: number): number[] {
  const best: number[] = [];
  for (let i = 0; i < values.length; i++) {
    if (best.length === n && values[i] <= values[best[n - 1]]) continue;
    let at = best.length;
    while (at > 0 && values[best[at - 1]] < values[i]) at--;
    best.splice(at, 0, i);
    best.length = Math.min(best.length, n);
  }
  return best;
}

// A token drawn from the softmax of logits over a temperature, whose limit at 0 is the likeliest.
export function sample(logits: Float32Array, temperature: number): number {
  const [likeliest] = largest(logits, 1);
  if (temperature === 0) return likeliest;
  let left = Math.random();
  const token = softmax(logits.map((x) => (x - logits[likeliest]) / temperature)).findIndex((p) => (left -= p) < 0);
  return token < 0 ? likeliest : token; // where rounding leaves something
}

// Run a generator to its end, in tasks between which the page goes on; return a function that stops it.
export function inTasks<T>(job: Iterator<unknown, T>, { progress = () => {}, done }: { progress?: () => void; done: (value: T) => void }): () => void {
  let timer = 0;
  function work() {
    const begun = performance.now();
    for (;;) {
      const step = job.next();
      if (step.done) return done(step.value);
      if (performance.now() - begun < TASK_MS) continue;
      progress();
      timer = setTimeout(work);
      return;
    }
  }
  work();
  return () => clearTimeout(timer);
}

// Whether the text that a panel reads is computed, and not only about to be.
export const isRead = ({ tokens, full }: { tokens: number[]; full: Pass }) => tokens.length === full.tokens.length;
