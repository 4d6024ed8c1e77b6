// From a text to tokens and windows.
import type { Config } from "./engine";

const HELD_OUT_FRACTION = 0.1;
const MAX_VOCABULARY = 256;
const MAX_HELD_OUT_WINDOWS = 64;

export interface Split {
  vocabulary: string[];
  training: number[];
  /** Windows of contextLength + 1 tokens, each of which begins with the last of the one before. */
  heldOut: number[][];
}

/** Return the characters of a text as tokens, of which the last tenth is held out. */
export function split(config: Config, text: string): Split {
  const T = config.contextLength;
  const characters = [...text];
  const vocabulary = [...new Set(characters)].sort();
  if (vocabulary.length > MAX_VOCABULARY) {
    throw new Error(`The text has ${vocabulary.length} different characters; give one with at most ${MAX_VOCABULARY}.`);
  }
  const tokens = encode(vocabulary, characters);
  const first = Math.floor(tokens.length * (1 - HELD_OUT_FRACTION));
  const windows = Math.floor((tokens.length - first - 1) / T);
  if (windows < 1) {
    const needed = Math.ceil((T + 2) / HELD_OUT_FRACTION);
    throw new Error(`The text has ${characters.length} characters; give at least ${needed}.`);
  }
  const heldOut = Array.from({ length: Math.min(windows, MAX_HELD_OUT_WINDOWS) }, (_, i) =>
    tokens.slice(first + i * T, first + (i + 1) * T + 1),
  );
  return { vocabulary, training: tokens.slice(0, first), heldOut };
}

/** Return the tokens of characters; those that the vocabulary lacks are left out. */
export function encode(vocabulary: string[], characters: Iterable<string>): number[] {
  const index = new Map(vocabulary.map((character, i) => [character, i]));
  return [...characters].flatMap((character) => index.get(character) ?? []);
}
