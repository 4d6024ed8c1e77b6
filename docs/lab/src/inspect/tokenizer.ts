import { visible } from "../page/dom";
import { bytesOf } from "./page";

// A byte-pair-encoding tokenizer, which `live.py` packs.

// Numbers, the lowest first (a binary heap).
class Queue {
  items: number[] = [];

  push(number: number): void {
    const { items } = this;
    let at = items.push(number) - 1;
    for (let above; at > 0 && items[(above = (at - 1) >> 1)] > number; at = above) items[at] = items[above];
    items[at] = number;
  }

  pop(): number {
    const { items } = this;
    const [first, last] = [items[0], items.pop()!];
    if (!items.length) return first;
    let at = 0;
    for (let below = 1; below < items.length; below = 2 * at + 1) {
      if (items[below + 1] < items[below]) below++;
      if (items[below] >= last) break;
      items[at] = items[below];
      at = below;
    }
    items[at] = last;
    return first;
  }
}

const LONGEST_WORD = 64; // of those whose tokens are kept, in characters

const bytes = (text: string) => [...new TextEncoder().encode(text)];

/** A step of normalisation or splitting, with the fields of its kind. */
type Step = { kind: string } & Record<string, any>;

/** A tokenizer, as `pack_tokenizer` in `live.py` packs it. */
interface PackedTokenizer {
  normalizers: Step[];
  splits: Step[];
  /** Tokens of bytes, null for none; or those of characters. */
  symbols: (number | null)[] | Record<string, number>;
  fallback: number[];
  merges: [number, number, number][];
  words: Record<string, number[]>;
  lengths: number[];
  bytes: string;
  begin: number[];
  end: number;
}

// Byte-pair encoding, as the `tokenizers` library does it.
export class Tokenizer {
  readonly tokenBytes: Uint8Array[];
  readonly ranks: Map<number, number>;
  private merged: number[];
  private words: Map<string, number[]>; // tokens of pieces

  constructor(private data: PackedTokenizer) {
    const { merges, words, lengths, bytes } = data;
    const all = bytesOf(bytes);
    let at = 0;
    this.tokenBytes = lengths.map((length) => all.subarray(at, (at += length)));
    this.ranks = new Map(merges.map(([left, right], rank) => [this.pair(left, right), rank]));
    this.merged = merges.map(([, , token]) => token);
    this.words = new Map(Object.entries(words));
  }

  private pair(left: number, right: number): number {
    return left * 2 ** 24 + right; // ids are below 2^24
  }

  encode(text: string): number[] {
    for (const step of this.data.normalizers) text = NORMALIZERS[step.kind](text, step);
    let pieces = text ? [text] : [];
    for (const step of this.data.splits) pieces = pieces.flatMap((piece, at) => SPLITS[step.kind](piece, step, at));
    return [...this.data.begin, ...pieces.flatMap((piece) => this.encodePiece(piece))];
  }

  // Merge the pair of the lowest rank, from the left, until there is none.
  private encodePiece(piece: string): number[] {
    const known = this.words.get(piece);
    if (known) return known;
    const tokens: (number | undefined)[] = this.symbolsOf(piece); // undefined where one is merged into the one before it
    const [next, previous] = [1, -1].map((step) => Int32Array.from(tokens, (_, at) => at + step));
    const rank = (at: number) => this.ranks.get(this.pair(tokens[at]!, tokens[next[at]]!)); // NaN, without a rank, where one is no more
    const queue = new Queue(); // ranks of pairs, and among equal ones positions
    const add = (at: number) => {
      const known = rank(at);
      if (known !== undefined) queue.push(known * 2 ** 31 + at);
    };
    for (let at = 0; at < tokens.length - 1; at++) add(at);
    while (queue.items.length) {
      const first = queue.pop();
      const [lowest, at] = [Math.floor(first / 2 ** 31), first % 2 ** 31];
      if (rank(at) !== lowest) continue; // the pair is no more
      tokens[at] = this.merged[lowest];
      tokens[next[at]] = undefined;
      next[at] = next[next[at]];
      if (next[at] < tokens.length) previous[next[at]] = at;
      add(at);
      if (at > 0) add(previous[at]);
    }
    const merged = tokens.filter((token) => token !== undefined);
    if (piece.length <= LONGEST_WORD) this.words.set(piece, merged);
    return merged;
  }

  // The tokens of single bytes or, where the vocabulary is of characters, of those and of the bytes of others.
  private symbolsOf(piece: string): number[] {
    const { symbols, fallback } = this.data;
    if (Array.isArray(symbols)) return bytes(piece).map((byte) => symbols[byte]).filter((token) => token !== null);
    const own = (letter: string) => Object.hasOwn(symbols, letter);
    return [...piece].flatMap((letter) =>
      own(letter) ? [symbols[letter]] : bytes(letter).map((byte) => fallback[byte]),
    );
  }

  // The first character that the vocabulary lacks, if there is one; no token stands for it.
  lacking(text: string): string | undefined {
    const { symbols } = this.data;
    if (!Array.isArray(symbols) || !symbols.includes(null)) return undefined;
    return [...text].find((letter) => bytes(letter).some((byte) => symbols[byte] === null));
  }

  decode(tokens: number[]): string {
    return utf8(tokens.flatMap((token) => [...(this.tokenBytes[token] ?? [])]));
  }

  // A token's text as a label, the same as `token_label` in Python.
  label(token: number): string {
    if (token === this.data.end) return "∅";
    const bytes = this.tokenBytes[token];
    return bytes?.length ? visible(legible(bytes)) : `[${token}]`;
  }
}

const utf8 = (bytes: ArrayLike<number>) => new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes));

// The text of bytes, where those that are no whole character are in hexadecimal.
function legible(all: Uint8Array): string {
  const isCharacter = (part: Uint8Array) => bytes(utf8(part)).join() === part.join();
  let text = "";
  for (let at = 0; at < all.length; ) {
    const size = [1, 2, 3, 4].find((n) => isCharacter(all.subarray(at, at + n)));
    text += size ? utf8(all.subarray(at, at + size)) : `⟨${all[at].toString(16).toUpperCase()}⟩`;
    at += size ?? 1;
  }
  return text;
}

const NORMALIZERS: Record<string, (text: string, step: Step) => string> = {
  unicode: (text, { form }) => text.normalize(form),
  prepend: (text, { start }) => (text ? start + text : text),
  replace: (text, { pattern, by }) => text.replaceAll(pattern, () => by),
};

// Each returns the pieces of a piece; `at` is its number.
const SPLITS: Record<string, (piece: string, step: Step, at: number) => string[]> = {
  space: (piece) => [piece.startsWith(" ") ? piece : ` ${piece}`],
  regex(piece, { pattern }) {
    const pieces = [];
    let end = 0;
    for (const match of piece.matchAll(new RegExp(pattern, "gu"))) {
      pieces.push(piece.slice(end, match.index), match[0]);
      end = match.index + match[0].length;
    }
    return [...pieces, piece.slice(end)].filter(Boolean);
  },
  metaspace(piece, { replacement, prepend, split }, at) {
    let text = piece.replaceAll(" ", replacement);
    if ((prepend === "always" || (prepend === "first" && at === 0)) && !text.startsWith(replacement)) text = replacement + text;
    if (!split) return [text];
    const [first, ...rest] = text.split(replacement);
    return [first, ...rest.map((part) => replacement + part)].filter(Boolean);
  },
};
