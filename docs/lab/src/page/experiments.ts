// What the page trains, as its address holds it: #blocks=4&heads=2&text=anagrams&A=no norm,no mask&B=no norm.
import { DEFAULT_CONFIG, DEFAULT_TEXT, type Fault } from "../engine";
import { NAMES } from "./faults";

export interface Experiment {
  blocks: number;
  heads: number;
  text: string;
  /** The switches of each model. */
  models: Fault[][];
}

/** Choices of blocks, and of heads per block. */
export const SIZES = [1, 2, 4];

/** Six words of the same four letters, in random order: what comes next depends on the order of the last letters. */
function anagrams(): string {
  const words = ["spot", "stop", "post", "tops", "opts", "pots"];
  let state = 7;
  const draw = () => (state = (state * 48271) % 2147483647) % words.length; // Park and Miller 1993
  return Array.from({ length: 1200 }, () => `${words[draw()]} `).join("");
}

const DEFAULT_NAME = "addresses";
/** Name in the address of a text of the reader's, which the address cannot hold. */
const OWN = "own";

const TEXTS: Record<string, { text: string; about: string }> = {
  [DEFAULT_NAME]: { text: DEFAULT_TEXT, about: "" },
  anagrams: { text: anagrams(), about: "a text of six words with the same four letters" },
};

export const MODEL_NAMES = ["A", "B"];
const DEFAULT_ADDRESS = `blocks=${DEFAULT_CONFIG.blocks}&heads=${DEFAULT_CONFIG.heads}&A=`;

export const isOwn = (text: string) => !Object.values(TEXTS).some((known) => known.text === text);

function nameOf(text: string): string {
  return Object.keys(TEXTS).find((name) => TEXTS[name].text === text) ?? OWN;
}

/** Return the part of an address after #; nothing for what the page opens with. */
export function toAddress({ blocks, heads, text, models }: Experiment): string {
  const fields = new URLSearchParams({ blocks: String(blocks), heads: String(heads) });
  if (nameOf(text) !== DEFAULT_NAME) fields.set("text", nameOf(text));
  models.forEach((faults, i) => fields.set(MODEL_NAMES[i], faults.join(",")));
  const address = fields.toString().replaceAll("%2C", ",").replaceAll("%28", "(").replaceAll("%29", ")");
  return address === DEFAULT_ADDRESS ? "" : address;
}

/**
 * Return the experiment of an address, and what it asks for that the page does not have. A stored text takes the place of
 * the address's.
 */
export function fromAddress(address: string, stored?: string): { experiment: Experiment; unknown: string[] } {
  const asked = new URLSearchParams(address);
  const names = ["blocks", "heads", "text", ...MODEL_NAMES];
  const unknown = [...asked].filter(([name]) => !names.includes(name)).map(([name, value]) => `${name}=${value}`);
  const known = <T>(name: string, value: string, found: T | undefined): T | undefined => {
    const remedy = value === OWN ? " (only a saved experiment holds it)" : "";
    if (found === undefined) unknown.push(`${name}=${value}${remedy}`);
    return found;
  };
  const size = (name: "blocks" | "heads") => {
    const value = asked.get(name) ?? String(DEFAULT_CONFIG[name]);
    return known(name, value, SIZES.find((size) => String(size) === value)) ?? DEFAULT_CONFIG[name];
  };
  const name = asked.get("text") ?? DEFAULT_NAME;
  const found = stored ?? (name === OWN ? remembered() : Object.hasOwn(TEXTS, name) ? TEXTS[name].text : undefined);
  const models = MODEL_NAMES.filter((model) => model === "A" || asked.has(model)).map((model) =>
    (asked.get(model) ?? "")
      .split(/,(?! 1)/) // the comma of "N(0, 1) weights" separates nothing
      .filter(Boolean)
      .flatMap((value) => known(model, value, NAMES.find((name) => name === value)) ?? []),
  );
  const text = known("text", name, found) ?? DEFAULT_TEXT;
  return { experiment: { blocks: size("blocks"), heads: size("heads"), text, models }, unknown };
}

export function describe({ blocks, heads, text, models }: Experiment): string {
  const about = isOwn(text) ? "own text" : TEXTS[nameOf(text)].about;
  return [
    sizes({ blocks, heads }),
    ...(about ? [about] : []),
    ...models.map((faults, i) => `${MODEL_NAMES[i]}: ${faults.join(", ") || "intact"}`),
  ].join("; ");
}

export const sizes = ({ blocks, heads }: { blocks: number; heads: number }) =>
  `${blocks} ${blocks === 1 ? "block" : "blocks"}, heads per block: ${heads}`;

/** Remember a text of the reader's until the tab is closed, so that the page can be loaded again. */
export function remember(text: string): void {
  if (!isOwn(text)) return;
  own = text;
  try {
    sessionStorage.setItem(OWN, text);
  } catch {} // a browser may refuse to store anything
}

let own: string | undefined;

function remembered(): string | undefined {
  try {
    own ??= sessionStorage.getItem(OWN) ?? undefined;
  } catch {}
  return own;
}

/** The experiments that the page opens on. */
export const GUIDED = [
  {
    title: "It cheats without a mask",
    watch:
      "Watch the loss of B: after about a hundred steps it drops below all that counting can reach, because B reads " +
      "the character that it has to predict.",
    address: "blocks=1&heads=2&A=&B=no+mask",
  },
  {
    title: "It explodes with four blocks",
    watch: "Watch the first steps: without a norm, B is not a number at step 5, while A, the same with a norm, learns.",
    address: "blocks=4&heads=4&A=&B=no+norm",
  },
  {
    title: "It cannot see order",
    watch:
      "Watch the words: after a hundred steps A writes several of the six of its text, but B, which does not know " +
      "where its letters are, mostly others.",
    address: "blocks=1&heads=4&text=anagrams&A=&B=no+positions",
  },
];
