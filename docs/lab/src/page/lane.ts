import { createLab, theory, type Config, type Fault, type Lab, type Look, type Progress, type Theory } from "../engine";
import { show } from "./dom";

/** Steps after which a model continues the prompt; later, whenever their number has doubled. */
export const SAMPLED_STEPS = [1, 25, 50, 100];
const SAMPLE_LENGTH = 40;
const PROMPT_LENGTH = 8;
const TEMPERATURE = 0.5;
/** Mean entropy in nats below which a head counts as one-hot: 1.1 positions. */
export const ONE_HOT = 0.1;

/** Change of a weight above which the page says that rows read the future; rounding changes weights by less. */
export const LEAK = 1e-3;

export interface Point {
  step: number;
  loss: number;
  heldOut: number;
}

/** Return the first step after this one at which models continue the prompt. */
export function nextSample(step: number): number {
  const last = SAMPLED_STEPS[SAMPLED_STEPS.length - 1];
  return SAMPLED_STEPS.find((sampled) => sampled > step) ?? last * 2 ** (Math.floor(Math.log2(step / last)) + 1);
}

/** Return the held-out loss at a step, on the line between the steps measured; undefined beyond the last. */
function lossAt(history: Point[], step: number): number | undefined {
  const at = history.findIndex((point) => point.step >= step);
  if (at < 0) return undefined;
  const [before, after] = [history[at - 1] ?? history[at], history[at]];
  const share = after.step === before.step ? 1 : (step - before.step) / (after.step - before.step);
  return before.heldOut + (after.heldOut - before.heldOut) * share;
}

/** One model on the page: what it has measured since its last reset. */
export class Lane {
  lab!: Lab;
  history: Point[] = [];
  flips: { step: number; text: string }[] = [];
  progress: Progress | null = null;
  /** The last progress whose numbers were all finite. */
  sound: Progress | null = null;
  brokenAt: number | null = null;
  look!: Look;
  /** The switches of the model that `look` shows. */
  seenFaults = new Set<Fault>();
  /** Largest change of an earlier row's attention if the last character of the text is another one; 0 if causal. */
  leak = 0;
  /** The characters that the model continues, and its continuations. */
  prompt = "";
  samples: { step: number; text: string }[] = [];
  /** Mean entropy of each block's attention in nats that theory predicts before training. */
  predicted: number[] = [];
  private text = "";

  constructor(
    readonly name: string,
    readonly faults: Set<Fault>,
  ) {}

  get step(): number {
    return this.progress?.step ?? 0;
  }

  async create(config: Config, text: string, probe: string): Promise<void> {
    this.text = text;
    const before = this.lab;
    this.lab = await createLab({ ...config, faults: [...this.faults] }, text);
    before?.dispose();
    this.begin(probe);
  }

  reset(probe: string): void {
    this.lab.setFaults([...this.faults]);
    this.lab.reset();
    this.begin(probe);
  }

  private begin(probe: string): void {
    [this.history, this.flips, this.samples] = [[], [], []];
    [this.progress, this.sound, this.brokenAt] = [null, null, null];
    this.prompt = [...probe].slice(0, PROMPT_LENGTH).join("");
    this.see(probe);
    this.predicted = theory(this.lab.config, this.text).entropyAtStart;
  }

  flip(fault: Fault, on: boolean, probe: string): void {
    if (on) this.faults.add(fault);
    else this.faults.delete(fault);
    if (this.step === 0) return this.reset(probe);
    this.lab.setFaults([...this.faults]);
    this.flips.push({ step: this.step, text: `${on ? "" : "not "}${fault}` });
    if (this.brokenAt === null) this.see(probe);
  }

  async advance(steps: number, probe: string): Promise<void> {
    if (this.brokenAt !== null) return;
    const before = this.step;
    const progress = (this.progress = await this.lab.train(steps));
    this.history.push({ step: progress.step, loss: progress.loss, heldOut: progress.heldOut });
    if (!progress.finite) {
      this.brokenAt = progress.step; // attention stays that of the step before: of NaN there is nothing to see
      return;
    }
    this.sound = progress;
    this.see(probe);
    if (progress.step >= nextSample(before)) {
      this.samples.push({ step: progress.step, text: this.lab.generate(this.prompt, SAMPLE_LENGTH, TEMPERATURE) });
    }
  }

  /** Whether no switch is on, nor has been since the last reset. */
  get isIntact(): boolean {
    return !this.faults.size && !this.flips.length;
  }

  /** Return how far the model is from an intact one of that history: a number of nats, and of what it is. */
  compare(intact: Point[]): [string, string] {
    if (!this.progress) return ["", ""];
    const { step, heldOut } = this.progress;
    const own = Number.isFinite(heldOut) ? `${heldOut.toFixed(2)} nats` : "Not finite";
    if (this.isIntact) return [own, `held out at step ${step}: the intact model.`];
    const reference = lossAt(intact, step);
    if (reference === undefined) {
      return [own, `held out at step ${step}; compare, at a switch, trains an intact model beside it.`];
    }
    const there = reference.toFixed(2);
    if (!Number.isFinite(heldOut)) return [own, `at step ${step}, where the intact model has ${there} nats.`];
    const gap = heldOut - reference;
    const size = `${Math.abs(gap).toFixed(2)} nats ${gap < 0 ? "better" : "worse"}`;
    return [size, `than the intact model at step ${step}: held out ${heldOut.toFixed(2)}, not ${there}.`];
  }

  /** Mean entropy of the rows in nats, [block][head]: of the last finite step's batch, or at first of the text shown. */
  get entropy(): number[][] {
    return this.sound?.entropy ?? this.look.pattern.map((heads) => heads.map(meanEntropy));
  }

  /** Look at the text, and at how much its rows change with its last character, which they must not see. */
  private see(probe: string): void {
    [this.look, this.seenFaults] = [this.lab.look(probe), new Set(this.faults)];
    const characters = [...probe];
    const last = characters.pop();
    const other = this.lab.look(
      characters.join("") + this.lab.vocabulary.find((character) => character !== last),
    ).pattern;
    const changes = this.look.pattern.flatMap((heads, block) =>
      heads.flatMap((A, head) =>
        A.slice(0, -1).flatMap((row, t) => row.map((a, s) => Math.abs(a - other[block][head][t][s]))),
      ),
    );
    this.leak = largest(changes);
  }

  /** Smallest and largest sum of a row of weights. */
  get rowSums(): [number, number] {
    const sums = this.look.pattern.flat(2).map(total);
    return [-largest(sums.map((sum) => -sum)), largest(sums)];
  }

  /** Norm of the gradient of all parameters, at the last finite step. */
  get gradient(): number {
    return Math.hypot(...(this.sound?.matrices ?? []).map((matrix) => matrix.gradient));
  }

  /** Sentences that say what the measurements mean; they never look at the switches. */
  explain(theory: Theory): string[] {
    if (this.brokenAt !== null) {
      const worst = [...(this.sound?.matrices ?? [])].sort((a, b) => b.gradient - a.gradient)[0];
      const before = worst
        ? ` At step ${this.sound!.step}, all gradients had a norm of ${show(this.gradient)}, most of it in ${worst.name}.`
        : "";
      return [
        `Step ${this.brokenAt}: not finite.${before} A number above 3.4·10³⁸ does not fit into 32 bits and becomes ` +
          "infinite; ∞ − ∞ is not a number (NaN), and the next step writes it into all parameters. " +
          `Below is step ${this.sound?.step ?? 0}, the last finite one. Reset begins anew.`,
      ];
    }
    if (!this.progress) return ["Not trained yet: attention below is that of random parameters."];
    const { heldOut } = this.progress;
    const { uniform, unigram, bigram } = theory;
    const sentences = [
      heldOut > uniform * 1.02
        ? "It is worse than a guess: it is sure of wrong characters."
        : heldOut > unigram * 1.02
          ? "It is better than a guess, and worse than the frequencies of characters."
          : heldOut > bigram
            ? "It is not yet as good as counting what follows each character."
            : heldOut < bigram / 2 && this.leak > LEAK
              ? "No model is that good so early, unless it reads what it has to predict."
              : "It uses more than the last character: the loss is below the bigram's.",
    ];
    const [least, most] = this.rowSums;
    if (this.leak > LEAK)
      sentences.push("Rows read the future: another last character changes the attention of earlier rows.");
    if (least < 0.99 || most > 1.01)
      sentences.push(`Rows do not sum to 1, but to ${least.toFixed(1)} to ${most.toFixed(1)}.`);
    const heads = this.entropy.flat();
    const sharp = heads.filter((entropy) => entropy < ONE_HOT).length;
    if (sharp) sentences.push(`${sharp} of ${heads.length} heads are one-hot: each row reads one position.`);
    return sentences;
  }
}

function largest(values: number[]): number {
  return values.reduce((a, b) => Math.max(a, b), -Infinity);
}

function total(values: number[]): number {
  return values.reduce((a, b) => a + b, 0);
}

function meanEntropy(A: number[][]): number {
  const rows = A.map((row) => {
    const sum = total(row);
    return -total(row.map((a) => (a > 0 ? (a / sum) * Math.log(a / sum) : 0)));
  });
  return total(rows) / rows.length;
}
