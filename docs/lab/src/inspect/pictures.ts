import { clamp } from "../page/dom";
import { bars, ink, makeTip, paint } from "./charts";
import { headGrid } from "./heads";
import { bytesOf, drawEach, make, percent } from "./page";

const MAX_DIMMING = 0.8; // of patches without attention

interface Layer {
  name: string;
  heads: number;
  weights: string;
  /** Largest weight of each picture and head. */
  largest: number[][];
}

interface Data {
  pictures: { source: string; name: string; bars: [string, number, boolean][] }[];
  layers: Layer[];
  grid: [number, number];
  mark: string;
}

function pictures(container: HTMLElement, { pictures: all, layers: packed, grid: [rows, columns], mark }: Data): void {
  const layers = packed.map((layer) => ({ ...layer, bytes: bytesOf(layer.weights) }));
  type Unpacked = (typeof layers)[number];
  const byte = (layer: Unpacked, picture: number, head: number, patch: number) => layer.bytes[(picture * layer.heads + head) * rows * columns + patch];
  let chosen: { layer: Unpacked; head: number } | null = null;
  const note = layers.length ? make("p", container, "", "note") : null;
  note?.setAttribute("aria-live", "polite");
  const place = make("div", container);
  const cards = make("div", container, "", "cards");
  const drawn = all.map(({ source, name, bars: items }, index) => {
    const card = make("figure", cards);
    const frame = make("div", card, "", "picture");
    const image = make("img", frame);
    [image.src, image.alt] = [source, name];
    const canvas = make("canvas", frame);
    make("figcaption", card, name);
    bars(card, items, mark);
    const tip = makeTip(card);
    frame.addEventListener("pointermove", (event) => {
      if (!chosen) return;
      const box = frame.getBoundingClientRect();
      const row = clamp(Math.floor((rows * (event.clientY - box.top)) / box.height), 0, rows - 1);
      const column = clamp(Math.floor((columns * (event.clientX - box.left)) / box.width), 0, columns - 1);
      const { layer, head } = chosen;
      const weight = (byte(layer, index, head, row * columns + column) / 255) ** 2 * layer.largest[index][head];
      tip.show(`patch in row ${row}, column ${column}: ${percent(weight)}`, event.clientX - box.left, event.clientY - box.top);
    });
    frame.addEventListener("pointerleave", tip.hide);
    return () => {
      if (!chosen) return paint(canvas, 1, 1, () => [0, 0, 0, 0]);
      const { layer, head } = chosen;
      const dimming = (patch: number) => 255 * MAX_DIMMING * (1 - byte(layer, index, head, patch) / 255);
      return paint(canvas, columns, rows, (row, column) => [0, 0, 0, dimming(row * columns + column)]);
    };
  });
  if (!layers.length) return;
  const grid = headGrid(place, layers, {
    canRelease: true,
    paintHead(canvas, layer, head) {
      const [r, g, b] = ink();
      paint(canvas, columns, rows, (row, column) => [r, g, b, byte(layer, 0, head, row * columns + column)]);
    },
    choose(layer, head) {
      chosen = layer && head !== undefined ? { layer, head } : null;
      note!.textContent = layer ? `The more head ${head} of ${layer.name} attends to a patch, the brighter it is.` : "The unmodified images.";
      drawn.forEach((again) => again());
    },
  });
  grid.querySelectorAll("button")[grid.querySelectorAll("button").length - layers.at(-1)!.heads].click();
}

drawEach("pictures", pictures);
