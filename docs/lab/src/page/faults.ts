import { LARGE_LEARNING_RATE, type Fault } from "../engine";

/** What each switch does, its formula, the chapter that explains it, and with how many blocks it shows, if not with 2. */
export const FAULTS: Record<Fault, { does: string; formula: string; chapter: string; blocks?: number }> = {
  "no mask": {
    does: "Each row also reads the characters after it, which it has to predict.",
    formula: "A = softmax(Q Kᵀ / √K), without −∞ above the diagonal",
    chapter: "attention",
  },
  "mask after softmax": {
    does: "The future is set to 0 only after the softmax, so rows no longer sum to 1.",
    formula: "A = mask · softmax(Q Kᵀ / √K)",
    chapter: "attention",
  },
  "unscaled scores": {
    does: "Scores are not divided, so their variance is K instead of 1.",
    formula: "A = softmax(Q Kᵀ)",
    chapter: "scale",
  },
  "N(0, 1) weights": {
    does: "W_Q, W_K, W_V and W_O start with variance 1. During training, it acts at the next reset.",
    formula: "W ~ N(0, 1) instead of N(0, 1/D)",
    chapter: "scale",
  },
  "no residual": {
    does: "Attention and MLP replace the row instead of adding to it.",
    formula: "x ← f(x) instead of x ← x + f(x)",
    chapter: "residual",
    blocks: 4,
  },
  "no norm": {
    does: "Attention and MLP read the stream as it is, however large it has become.",
    formula: "f(x) instead of f(γ x / √mean(x²))",
    chapter: "depth",
    blocks: 4,
  },
  "softmax over queries": {
    does: "The softmax runs over the wrong axis: columns sum to 1, rows do not.",
    formula: "A_ts = exp(z_ts) / Σ_t exp(z_ts)",
    chapter: "attention",
  },
  "no positions": {
    does: "Rows know their character, not where it is.",
    formula: "x_t = e(c_t) instead of e(c_t) + p_t",
    chapter: "mixing",
  },
  "large learning rate": {
    does: `Each step is ${LARGE_LEARNING_RATE} times as long.`,
    formula: `η ← ${LARGE_LEARNING_RATE} η`,
    chapter: "sharpness",
  },
};

export const NAMES = Object.keys(FAULTS) as Fault[];
