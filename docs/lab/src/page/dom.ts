type Listener = (event: Event) => void;
type Attributes = Record<string, string | number | boolean | Listener>;
type Child = Node | string;

function fill<E extends Element>(element: E, attributes: Attributes, children: Child[]): E {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (typeof value === "boolean") element.toggleAttribute(name, value);
    else element.setAttribute(name, String(value));
  }
  element.append(...children);
  return element;
}

/** Return a new element. An attribute whose value is a function is a listener of the event of that name. */
export function h<K extends keyof HTMLElementTagNameMap>(tag: K, attributes: Attributes = {}, ...children: Child[]) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg<K extends keyof SVGElementTagNameMap>(tag: K, attributes: Attributes = {}, ...children: Child[]) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

export function get<E extends HTMLElement = HTMLElement>(id: string): E {
  return document.getElementById(id) as E;
}

/** Set a text, unless it is the same: a screen reader would say it again. */
export function write(element: HTMLElement, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** Smallest size that is not 0 to the model, which computes in 32 bits. */
const SMALLEST = 2 ** -126;

/** Return a number with three significant digits. */
export function show(value: number): string {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "not finite" : value > 0 ? "∞" : "-∞";
  const size = Math.abs(value);
  if (size < SMALLEST) return "0";
  if (size < 1e-3 || size >= 1e5) return value.toExponential(1);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
}

const SYMBOLS: Record<string, string> = { " ": "␣", "\n": "⏎", "\t": "⇥", "\x7f": "␡" };
const controlPicture = (letter: string) => String.fromCharCode(0x2400 + letter.charCodeAt(0)); // Unicode has one for each

/** Return a text with symbols for spaces, ends of lines and control characters. */
export const visible = (text: string) =>
  text.replace(/[\x00-\x20\x7f]/g, (letter) => SYMBOLS[letter] ?? controlPicture(letter));

/** Return a text without ends of lines: they are visible instead. */
export const oneLine = (text: string) => text.replaceAll("\n", "⏎");

/** Return the colours of a CSS variable as red, green and blue. */
export function colour(variable: string): number[] {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** Draw a matrix of shares from 0 to 1 on a canvas, one pixel per entry; what is not a number stays transparent. */
export function drawMatrix(canvas: HTMLCanvasElement, shares: number[][]): void {
  const [low, high] = [colour("--low"), colour("--high")];
  const [height, width] = [shares.length, shares[0].length];
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  const context = canvas.getContext("2d")!;
  const image = context.createImageData(width, height);
  shares.flat().forEach((share, at) => {
    if (Number.isNaN(share)) return;
    image.data.set(
      [0, 1, 2].map((i) => low[i] + (high[i] - low[i]) * Math.min(1, share)),
      4 * at,
    );
    image.data[4 * at + 3] = 255;
  });
  context.putImageData(image, 0, 0);
}

/** Call `move(columns, rows)` for arrow keys, Home and End. */
export function onArrows(element: Element, move: (columns: number, rows: number) => void): void {
  const moves: Record<string, [number, number]> = {
    ArrowLeft: [-1, 0],
    ArrowRight: [1, 0],
    ArrowUp: [0, -1],
    ArrowDown: [0, 1],
    Home: [-1e9, 0],
    End: [1e9, 0],
  };
  element.addEventListener("keydown", (event) => {
    const { key, altKey, ctrlKey, metaKey } = event as KeyboardEvent;
    if (!(key in moves) || altKey || ctrlKey || metaKey) return;
    event.preventDefault();
    move(...moves[key]);
  });
}

export const clamp = (value: number, low: number, high: number) => Math.max(low, Math.min(high, value));
