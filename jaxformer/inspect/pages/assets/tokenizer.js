"use strict";

// A byte-pair-encoding tokenizer, which `live.py` packs.

function decodeBase64(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

// Numbers, the lowest first (a binary heap).
class Queue {
  items = [];

  push(number) {
    const { items } = this;
    let at = items.push(number) - 1;
    for (let above; at > 0 && items[(above = (at - 1) >> 1)] > number; at = above) items[at] = items[above];
    items[at] = number;
  }

  pop() {
    const { items } = this;
    const [first, last] = [items[0], items.pop()];
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

const bytes = (text) => [...new TextEncoder().encode(text)];

// Byte-pair encoding, as the `tokenizers` library does it.
class Tokenizer {
  constructor({ normalizers, splits, symbols, fallback, merges, words, lengths, bytes, begin, end }) {
    Object.assign(this, { normalizers, splits, symbols, fallback, begin, end, isByteLevel: Array.isArray(symbols) });
    const all = decodeBase64(bytes);
    let at = 0;
    this.tokenBytes = lengths.map((length) => all.subarray(at, (at += length)));
    this.ranks = new Map(merges.map(([left, right], rank) => [this.pair(left, right), rank]));
    this.merged = merges.map(([, , token]) => token);
    this.words = new Map(Object.entries(words)); // tokens of pieces
  }

  pair(left, right) {
    return left * 2 ** 24 + right; // ids are below 2^24
  }

  encode(text) {
    for (const step of this.normalizers) text = NORMALIZERS[step.kind](text, step);
    let pieces = text ? [text] : [];
    for (const step of this.splits) pieces = pieces.flatMap((piece, at) => SPLITS[step.kind](piece, step, at));
    return [...this.begin, ...pieces.flatMap((piece) => this.encodePiece(piece))];
  }

  // Merge the pair of the lowest rank, from the left, until there is none.
  encodePiece(piece) {
    const known = this.words.get(piece);
    if (known) return known;
    const tokens = this.symbolsOf(piece); // undefined where one is merged into the one before it
    const [next, previous] = [1, -1].map((step) => Int32Array.from(tokens, (_, at) => at + step));
    const rank = (at) => this.ranks.get(this.pair(tokens[at], tokens[next[at]]));
    const queue = new Queue(); // ranks of pairs, and among equal ones positions
    const add = (at) => { if (rank(at) !== undefined) queue.push(rank(at) * 2 ** 31 + at); };
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
  symbolsOf(piece) {
    if (this.isByteLevel) return bytes(piece).map((byte) => this.symbols[byte]).filter((token) => token !== null);
    const own = (letter) => Object.hasOwn(this.symbols, letter);
    return [...piece].flatMap((letter) =>
      own(letter) ? [this.symbols[letter]] : bytes(letter).map((byte) => this.fallback[byte]),
    );
  }

  // The first character that the vocabulary lacks, if there is one; no token stands for it.
  lacking(text) {
    if (!this.isByteLevel || !this.symbols.includes(null)) return undefined;
    return [...text].find((letter) => bytes(letter).some((byte) => this.symbols[byte] === null));
  }

  decode(tokens) {
    return utf8(tokens.flatMap((token) => [...(this.tokenBytes[token] ?? [])]));
  }

  // A token's text as a label, the same as `token_label` in Python.
  label(token) {
    if (token === this.end) return "∅";
    const bytes = this.tokenBytes[token];
    return bytes?.length ? visible(legible(bytes)) : `[${token}]`;
  }
}

const SYMBOLS = { " ": "␣", "\n": "⏎", "\t": "⇥", "\x7f": "␡" };
const controlPicture = (letter) => String.fromCharCode(0x2400 + letter.charCodeAt(0)); // Unicode has one for each
const visible = (text) => text.replace(/[\x00-\x20\x7f]/g, (letter) => SYMBOLS[letter] ?? controlPicture(letter));
const utf8 = (bytes) => new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes));

// The text of bytes, where those that are no whole character are in hexadecimal.
function legible(all) {
  const isCharacter = (part) => bytes(utf8(part)).join() === part.join();
  let text = "";
  for (let at = 0; at < all.length; ) {
    const size = [1, 2, 3, 4].find((n) => isCharacter(all.subarray(at, at + n)));
    text += size ? utf8(all.subarray(at, at + size)) : `⟨${all[at].toString(16).toUpperCase()}⟩`;
    at += size ?? 1;
  }
  return text;
}

const NORMALIZERS = {
  unicode: (text, { form }) => text.normalize(form),
  prepend: (text, { start }) => (text ? start + text : text),
  replace: (text, { pattern, by }) => text.replaceAll(pattern, () => by),
};

// Each returns the pieces of a piece; `at` is its number.
const SPLITS = {
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
