import { clamp } from "../page/dom";
import { bars, cells, CHARACTER_PIXELS, ink, NOT_EXPLANATION, paint, signed, weightScale } from "./charts";
import { headGrid } from "./heads";
import { bytesOf, colour, dark, drawEach, make, onFrame, percent, rove } from "./page";

// Most pixels of a thumbnail's side, opacity of the colour behind a token of weight 1, largest cell of the map, smallest
// cell with room for a label, and most letters of one.
const [THUMBNAIL_PIXELS, MAX_OPACITY, LARGEST_CELL, LABELLED_CELL, LABEL_LETTERS] = [112, 0.5, 28, 11, 12];

interface Layer {
  name: string;
  heads: number;
  /** Names of the texts of its queries and keys. */
  rows: string;
  columns: string;
  causal: boolean;
  frames: string[];
  ablation?: number[];
}

interface Data {
  texts: Record<string, string[]>;
  predictions: Record<string, ([string, [string, number, boolean][]] | null)[]>;
  layers: Layer[];
}

function attention(container: HTMLElement, { texts, predictions, layers: packed }: Data): void {
  const layers = packed.map((layer) => {
    const frames = layer.frames.map(bytesOf);
    return { ...layer, frames, bytes: frames.at(-1)!, T: texts[layer.rows].length, S: texts[layer.columns].length };
  });
  type Unpacked = (typeof layers)[number];
  const byte = ({ bytes, causal, T, S }: Unpacked, head: number, row: number, column: number) => {
    if (!causal) return bytes[(head * T + row) * S + column];
    return column > row ? 0 : bytes[((head * T * (T + 1)) + row * (row + 1)) / 2 + column];
  };
  const weight = (...at: Parameters<typeof byte>) => (byte(...at) / 255) ** 2;
  const ablation = ({ ablation }: Unpacked, head: number) => (ablation ? [`Its mean ablation changes the loss by ${signed(ablation[head])} nats.`] : []);
  const several = Object.keys(texts).length > 1;

  const strips: Record<string, HTMLButtonElement[]> = {};
  const box = make("div", container, "", "strips");
  for (const [name, tokens] of Object.entries(texts)) {
    if (several) make("p", box, name, "name");
    const strip = make("div", box, "", "tokens");
    rove(strip);
    strips[name] = tokens.map((token, at) => {
      const button = make("button", strip, token);
      button.tabIndex = at ? -1 : 0;
      if (token.endsWith("⏎")) strip.append("\n");
      for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => select(name, at));
      button.addEventListener("click", () => { pinned = pinned === button ? null : button; select(name, at, true); });
      return button;
    });
  }
  const note = make("p", container, "", "note");
  note.setAttribute("aria-live", "polite");
  const predicted = make("div", container, "", "predicted");
  let chosen: { layer: Unpacked; head: number } | null = null;
  let pinned: HTMLButtonElement | null = null;
  let current: [string, number] | null = null;
  let map: HTMLElement | null = null;
  let drawn: ReturnType<typeof cells> | null = null;
  let width = 0;

  function select(name: string, at: number, force = false): void {
    if (pinned && !force) return;
    current = [name, at];
    for (const strip of Object.values(strips)) for (const token of strip) { token.style.background = ""; token.className = ""; }
    strips[name][at].className = "from";
    const about = [`${several ? `${name[0].toUpperCase()}${name.slice(1)} ` : "Position "}${at}: “${texts[name][at]}”.`];
    if (chosen && chosen.layer.rows === name) {
      const { layer, head } = chosen;
      const shares = texts[layer.columns].map((_, column) => weight(layer, head, at, column));
      shares.forEach((share, column) => {
        strips[layer.columns][column].style.background = `rgba(${colour("--look")}, ${Math.sqrt(share) * MAX_OPACITY})`;
      });
      const most = shares.map((share, column) => [share, column]).sort((a, b) => b[0] - a[0]).slice(0, 4);
      const named = most.filter(([share]) => share > 0).map(([share, column]) => `“${texts[layer.columns][column]}” ${percent(share)}`);
      about.push(`Head ${head} of ${layer.name} attends to ${named.join(", ")}.`, ...ablation(layer, head));
    }
    note.textContent = about.join(" ");
    predicted.replaceChildren();
    const prediction = predictions[name]?.[at];
    if (!prediction) return;
    make("p", predicted, prediction[0], "name");
    bars(predicted, prediction[1], "in the text");
  }

  function choose(layer: Unpacked, head: number): void {
    chosen = { layer, head };
    drawMap();
    if (current && current[0] !== layer.rows) pinned = null;
    select(layer.rows, current && current[0] === layer.rows ? current[1] : first(layer.rows), true);
  }

  function drawMap(): void {
    if (!map?.clientWidth) return;
    width = map.clientWidth;
    const { layer, head } = chosen!; // the map is made with its first head
    drawn?.remove();
    map.replaceChildren();
    make("p", map, `Head ${head} of ${layer.name}: queries are rows, keys are columns.`, "name");
    const short = (text: string) => (text.length > LABEL_LETTERS ? `${text.slice(0, LABEL_LETTERS - 1)}…` : text);
    const [rows, columns] = [layer.rows, layer.columns].map((name) => texts[name].map(short));
    const labels = 20 + CHARACTER_PIXELS * Math.max(...rows.map((text) => text.length));
    const room = (map.clientWidth - labels - (several ? 20 : 0)) / layer.S;
    const side = clamp(room, 2, LARGEST_CELL);
    const labelled = side >= LABELLED_CELL;
    drawn = cells(map, {
      title: `attention map of head ${head} of ${layer.name}`, cell: [side, side], gap: side > 7, columnLabels: labelled,
      rows: labelled ? rows : rows.map(() => ""), columns: labelled ? columns : columns.map(() => ""),
      value: (row, column) => weight(layer, head, row, column), scale: weightScale,
      told: (row, column) => `“${texts[layer.rows][row]}” (${row}) to “${texts[layer.columns][column]}” (${column}): ${percent(weight(layer, head, row, column))}`,
      chosen: (row) => select(layer.rows, row),
    });
  }

  function paintHead(canvas: HTMLCanvasElement, layer: Unpacked, head: number): void {
    // With more tokens than pixels, a pixel shows the largest of the weights that share it.
    const [columns, rows] = [Math.min(layer.S, THUMBNAIL_PIXELS), Math.min(layer.T, THUMBNAIL_PIXELS)];
    const largest = new Uint8Array(columns * rows);
    for (let row = 0; row < layer.T; row++) {
      for (let column = 0; column < layer.S; column++) {
        const at = Math.floor((row * rows) / layer.T) * columns + Math.floor((column * columns) / layer.S);
        largest[at] = Math.max(largest[at], byte(layer, head, row, column));
      }
    }
    const [r, g, b] = ink();
    paint(canvas, columns, rows, (row, column) => [r, g, b, largest[row * columns + column]]);
  }

  // The last position, or the last that has a prediction.
  function first(name: string): number {
    const last = (predictions[name] ?? []).findLastIndex((prediction) => prediction);
    return last < 0 ? texts[name].length - 1 : last;
  }

  dark.addEventListener("change", () => { if (current) select(...current, true); });
  onFrame(({ index }) => {
    for (const layer of layers) layer.bytes = layer.frames[index];
    if (chosen) drawMap();
    if (current) select(...current, true);
  });
  if (!layers.length) {
    const name = Object.keys(texts).at(-1)!;
    select(name, first(name));
    return;
  }
  const thumbnails = headGrid(container, layers, { paintHead, choose: (layer, head) => choose(layer!, head!), describe: ablation });
  const place = (map = make("div", container, "", "map"));
  make("p", container, NOT_EXPLANATION, "name about");
  new ResizeObserver(() => { if (place.clientWidth !== width) drawMap(); }).observe(place);
  thumbnails.querySelector("button")!.click();
}

drawEach("attention", attention);
