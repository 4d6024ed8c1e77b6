// The experiment as a picture and as a file.
import { colour, drawMatrix, h } from "./dom";
import type { Lane } from "./lane";

const SCALE = 2;
const PADDING = 16;
const LINE = 18;
/** Width of a map in the picture. */
const MAP = 128;
const MAX_STORED_BYTES = 10_000_000;
const FONT = "13px system-ui, sans-serif";
/** Properties that the style of the page gives to a drawing. */
const DRAWN = "fill font opacity paint-order stroke stroke-dasharray stroke-linejoin stroke-width".split(" ");

export interface Pictured {
  /** Of the model, and of the bar next to its map. */
  colour: string;
  map: number[][];
  lines: string[];
}

/** Return the losses, a map of each model with lines beside it, and a caption, as PNG. */
export async function drawPicture(plot: SVGSVGElement, caption: string, models: Pictured[]): Promise<Blob> {
  const chart = await toImage(plot);
  const [width, start] = [chart.width + 2 * PADDING, chart.height + 2 * PADDING];
  const canvas = document.createElement("canvas");
  const context = canvas.getContext("2d")!;
  const broken = (text: string, room: number): string[] => {
    context.font = FONT;
    return text.split(" ").reduce<string[]>((lines, word) => {
      const longer = lines.length ? `${lines[lines.length - 1]} ${word}` : word;
      if (!lines.length || context.measureText(longer).width > room) return [...lines, word];
      return [...lines.slice(0, -1), longer];
    }, []);
  };
  const beside = models.map(({ lines }) => lines.flatMap((line) => broken(line, width - MAP - 3 * PADDING)));
  const heights = beside.map((lines) => Math.max(MAP, lines.length * LINE) + PADDING);
  const below = broken(caption, width - 2 * PADDING);
  const height = start + heights.reduce((a, b) => a + b, 0) + below.length * LINE + PADDING;
  [canvas.width, canvas.height] = [width * SCALE, height * SCALE];
  context.scale(SCALE, SCALE);
  const [card, text] = [colour("--card"), colour("--text")].map((rgb) => `rgb(${rgb})`);
  context.fillStyle = card;
  context.fillRect(0, 0, width, height);
  context.drawImage(chart, PADDING, PADDING);
  [context.font, context.textBaseline, context.imageSmoothingEnabled] = [FONT, "top", false];
  const write = (lines: string[], x: number, y: number) =>
    lines.forEach((line, i) => context.fillText(line, x, y + i * LINE));
  let y = start;
  models.forEach((model, i) => {
    const map = document.createElement("canvas");
    drawMatrix(
      map,
      model.map.map((row) => row.map(Math.sqrt)),
    );
    context.drawImage(map, PADDING, y, MAP, MAP);
    context.fillStyle = `rgb(${colour(model.colour)})`;
    context.fillRect(PADDING + MAP, y, 3, MAP);
    context.fillStyle = text;
    write(beside[i], MAP + 2 * PADDING, y);
    y += heights[i];
  });
  write(below, PADDING, y);
  return new Promise((resolve) => canvas.toBlob((blob) => resolve(blob!), "image/png"));
}

/** Return a drawing of the page with its style, which lies outside of it. */
async function toImage(plot: SVGSVGElement): Promise<HTMLImageElement> {
  const copy = plot.cloneNode(true) as SVGSVGElement;
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  const [from, to] = [plot, copy].map((root) => [...root.querySelectorAll<SVGElement>("*")]);
  from.forEach((element, i) => {
    const style = getComputedStyle(element);
    for (const name of DRAWN) to[i].style.setProperty(name, style.getPropertyValue(name));
  });
  const image = new Image(Number(plot.getAttribute("width")), Number(plot.getAttribute("height")));
  image.src = `data:image/svg+xml,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  await image.decode();
  return image;
}

/** Let the reader store a file. */
export function offer(name: string, content: Blob): void {
  const url = URL.createObjectURL(content);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Return what the page has trained as JSON: what `readFile` needs, and what was measured. */
export function toFile(address: string, text: string, lanes: Lane[]): Blob {
  const models = lanes.map(({ name, lab, faults, flips, history, brokenAt, prompt, samples }) => ({
    name,
    config: { ...lab.config, faults: [...faults] },
    flips,
    history,
    notFiniteAt: brokenAt,
    prompt,
    samples,
  }));
  return new Blob([JSON.stringify({ laboratory: address, text, models }, null, 1)], { type: "application/json" });
}

export interface Stored {
  /** Of the file. */
  name: string;
  address: string;
  text: string;
}

/** Return a stored experiment. Throws an `Error` with one sentence for another file. */
export async function readFile(file: File): Promise<Stored> {
  const remedy = "choose a file that Save experiment wrote.";
  if (file.size > MAX_STORED_BYTES) {
    throw new Error(`${file.name} has ${file.size} bytes, and ${MAX_STORED_BYTES} are the most; ${remedy}`);
  }
  try {
    const { laboratory: address, text } = JSON.parse(await file.text());
    if (typeof address === "string" && typeof text === "string") return { name: file.name, address, text };
  } catch {} // not JSON, or not an object
  throw new Error(`${file.name} is not an experiment of the laboratory; ${remedy}`);
}
