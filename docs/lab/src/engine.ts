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
  loss: number;
  heldOut: number;
  /** Mean entropy of the attention weights in nats, [block][head]. */
  entropy: number[][];
  /** Variance of the visible scores, [block][head]. */
  scoreVariance: number[][];
  matrices: Matrix[];
  finite: boolean;
}

/** What attention computes: [block][head][query][key], and [block][head][position][K]. */
export interface Look {
  tokens: number[];
  weights: number[][][][];
  scores: number[][][][];
  queries: number[][][][];
  keys: number[][][][];
  values: number[][][][];
}

export interface Lab {
  readonly config: Config;
  readonly vocabulary: string[];
  readonly step: number;
  /** Parameters stay; "N(0, 1) weights" acts when they are drawn, by `reset`. */
  setFaults(faults: Fault[]): void;
  /** Train, and measure at the last of these steps. */
  train(steps: number): Promise<Progress>;
  look(text: string): Look;
  generate(prompt: string, tokens: number, temperature: number): string;
  /** Gradient of the last batch's loss, row-major. */
  gradient(name: string): number[];
  /** Parameter, row-major. */
  parameter(name: string): number[];
  reset(): void;
}

/** Losses of models without attention in nats per token, and the entropy of uniform causal attention. */
export interface Theory {
  uniform: number;
  unigram: number;
  bigram: number;
  entropyAtStart: number[];
}
