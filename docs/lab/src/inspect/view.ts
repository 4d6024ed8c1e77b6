import type { Edits, Model, Pass } from "./decoder";
import type { Tokenizer } from "./tokenizer";

/** What a panel of the live page reads of it. */
export interface View {
  readonly model: Model;
  readonly tokenizer: Tokenizer;
  /** The text with all heads. */
  readonly full: Pass;
  /** Ablated heads, as edits of a pass. */
  readonly off: Edits;
  /** The text without them. */
  active(): Pass;
  label(token: number): string;
  quoted(token: number): string;
  /** Colour behind a token of a weight. */
  shade(weight: number): string;
  readonly text: string;
  readonly tokens: number[];
  readonly position: number;
  /** Block and head whose attention is shown. */
  readonly chosen: [number, number];
  /** Number of updates, from their beginning. */
  readonly version: number;
}

/** A part of the live page; `draw` follows each change of text, position or head. */
export interface Panel {
  draw(): void;
}
