import { clamp, colour, drawMatrix, h, onArrows, show, visible } from "./dom";
import type { Lane } from "./lane";

/** What the reader looks at, the same in all lanes. */
export interface Selection {
  block: number;
  head: number;
  query: number;
  key: number;
  matrix: string;
}

const CELL = 14;
const MARGIN = 16;
const LARGEST_BARS = 6;

/** Small maps of all heads, each a button; return the function that draws them anew. */
export function makeMaps(container: HTMLElement, lane: Lane, selection: Selection, select: () => void) {
  const { blocks, heads } = lane.lab.config;
  const figures = Array.from({ length: blocks * heads }, (_, i) => {
    const [block, head] = [Math.floor(i / heads), i % heads];
    const canvas = h("canvas");
    const button = h(
      "button",
      {
        click: () => {
          Object.assign(selection, { block, head });
          select();
        },
      },
      canvas,
    );
    const entropy = h("p");
    const variance = h("p");
    container.append(h("figure", {}, button, h("figcaption", {}, `head ${block}.${head}`), entropy, variance));
    return { block, head, canvas, button, entropy, variance };
  });
  container.style.setProperty("--heads", String(heads));
  return () => {
    for (const { block, head, canvas, button, entropy, variance } of figures) {
      drawMatrix(
        canvas,
        lane.look.pattern[block][head].map((row) => row.map(Math.sqrt)),
      );
      const H = lane.entropy[block][head];
      const spread = lane.sound?.scoreVariance[block][head];
      entropy.textContent = `${show(H)} nats`;
      variance.textContent = spread === undefined ? "" : `variance ${show(spread)}`;
      button.setAttribute("aria-pressed", String(block === selection.block && head === selection.head));
      button.setAttribute("aria-label", `${lane.name}, block ${block}, head ${head}: entropy ${show(H)} nats`);
    }
  };
}

/** The selected map, large, with a cell that clicks and arrow keys choose. */
export function makeLargeMap(container: HTMLElement, lane: Lane, selection: Selection, select: () => void) {
  const canvas = h("canvas", { class: "large", tabindex: 0, role: "application" });
  container.append(canvas);
  const T = lane.lab.config.contextLength;
  const side = MARGIN + T * CELL;
  const scale = Math.max(1, Math.min(2, devicePixelRatio));
  [canvas.width, canvas.height] = [side * scale, side * scale];
  const choose = (query: number, key: number) => {
    Object.assign(selection, { query: clamp(query, 0, T - 1), key: clamp(key, 0, T - 1) });
    select();
  };
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect();
    const cell = (at: number, length: number) => Math.floor(((at / length) * side - MARGIN) / CELL);
    choose(cell(event.clientY - box.top, box.height), cell(event.clientX - box.left, box.width));
  });
  onArrows(canvas, (columns, rows) => choose(selection.query + rows, selection.key + columns));
  return () => {
    const context = canvas.getContext("2d")!;
    const { block, head, query, key } = selection;
    const A = lane.look.pattern[block][head];
    const characters = lane.look.tokens.map((token) => visible(lane.lab.vocabulary[token]));
    const small = document.createElement("canvas");
    drawMatrix(
      small,
      A.map((row) => row.map(Math.sqrt)),
    );
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, side, side);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, MARGIN, MARGIN, T * CELL, T * CELL);
    const [text, accent] = ["--text", "--accent"].map((name) => `rgb(${colour(name)})`);
    context.font = "11px ui-monospace, monospace";
    [context.textAlign, context.textBaseline] = ["center", "middle"];
    characters.forEach((character, at) => {
      context.fillStyle = at === query ? accent : text;
      context.fillText(character, MARGIN / 2, MARGIN + (at + 0.5) * CELL);
      context.fillStyle = at === key ? accent : text;
      context.fillText(character, MARGIN + (at + 0.5) * CELL, MARGIN / 2);
    });
    [context.strokeStyle, context.lineWidth] = [accent, 2];
    context.strokeRect(MARGIN + key * CELL, MARGIN + query * CELL, CELL, CELL);
    canvas.setAttribute(
      "aria-label",
      `${lane.name}: attention of block ${block}, head ${head}. Rows read, columns are read. ` +
        `Row ${query} “${characters[query]}” gives ${show(A[query][key])} to ${key} “${characters[key]}”. Arrow keys move.`,
    );
  };
}

/** What becomes of one cell's query and key, number by number. `isHidden` while the reader guesses a switch. */
export function makeSteps(container: HTMLElement, lane: Lane, selection: Selection, isHidden: () => boolean) {
  return () => {
    const { block, head, query: t, key: s } = selection;
    const { look } = lane;
    const [q, k] = [look.q[block][head][t], look.k[block][head][s]];
    const characters = look.tokens.map((token) => visible(lane.lab.vocabulary[token]));
    const about = h("p", {}, `Row ${t} “${characters[t]}” asks, position ${s} “${characters[s]}” answers:`);
    const largest = look.pattern[block][head][t]
      .map((a, at) => ({ a, at }))
      .sort((x, y) => y.a - x.a)
      .slice(0, LARGEST_BARS)
      .filter(({ a }) => a > 0);
    const bars = h(
      "ul",
      { class: "bars" },
      ...largest.map(({ a, at }) =>
        h(
          "li",
          at === s ? { class: "marked" } : {},
          h("span", { class: "label" }, `${at} ${characters[at]}`),
          h("span", { class: "track" }, h("span", { class: "bar", style: `width:${Math.min(1, a) * 100}%` })),
          h("span", { class: "value" }, show(a)),
        ),
      ),
    );
    const row = h("p", { class: "name" }, `Largest weights of row ${t}`);
    if (isHidden()) {
      container.replaceChildren(h("p", {}, "The arithmetic is hidden while you look for the switch."), row, bars);
      return;
    }
    const numbers = (name: string, values: number[]) =>
      h("tr", {}, h("th", { scope: "row" }, name), ...values.map((value) => h("td", { class: "number" }, show(value))));
    const table = h(
      "div",
      { class: "wide", tabindex: 0, role: "region", "aria-label": `Query, key and their products, ${lane.name}` },
      h(
        "table",
        {},
        h(
          "tbody",
          {},
          numbers("q", q),
          numbers("k", k),
          numbers(
            "q·k",
            q.map((value, i) => value * k[i]),
          ),
        ),
      ),
    );
    const steps = h("ol", { class: "arithmetic" }, ...arithmetic(lane, selection).map((step) => h("li", {}, step)));
    container.replaceChildren(about, table, steps, row, bars);
  };
}

/** Compute one attention weight from its query and keys as the switches say; return each step as a sentence. */
export function arithmetic(lane: Lane, { block, head, query: t, key: s }: Selection): string[] {
  const { look, seenFaults: faults } = lane;
  const [Q, keys] = [look.q[block][head], look.k[block][head]];
  const K = Q[t].length;
  const dot = (a: number[], b: number[]) => a.reduce((sum, value, i) => sum + value * b[i], 0);
  const score = (row: number, column: number) =>
    dot(Q[row], keys[column]) / (faults.has("unscaled scores") ? 1 : Math.sqrt(K));
  const [unmasked, late] = [faults.has("no mask"), faults.has("mask after softmax")];
  const sees = (row: number, column: number) => unmasked || column <= row;
  const [product, z] = [dot(Q[t], keys[s]), score(t, s)];
  const positions = look.tokens.map((_, at) => at);
  const byColumn = faults.has("softmax over queries");
  const terms = byColumn
    ? positions.filter((row) => late || sees(row, s)).map((row) => score(row, s))
    : positions.filter((column) => late || sees(t, column)).map((column) => score(t, column));
  const highest = Math.max(...terms);
  const sum = terms.reduce((total, term) => total + Math.exp(term - highest), 0);
  const isSeen = sees(t, s);
  const weight = isSeen || late ? Math.exp(z - highest) / sum : 0;
  const over = byColumn ? `column ${s}` : `row ${t}`;
  return [
    `Sum of the ${K} products: ${show(product)}.`,
    faults.has("unscaled scores")
      ? `Not divided by √${K}, because of the switch.`
      : `Divided by √${K} = ${show(Math.sqrt(K))}: ${show(z)}.`,
    unmasked
      ? "No mask, because of the switch."
      : late
        ? "The mask comes after the softmax, because of the switch."
        : isSeen
          ? `Mask: ${s} ≤ ${t}, so the score stays.`
          : `Mask: ${s} > ${t} lies in the future, so the score becomes −∞ and its weight 0.`,
    ...(isSeen || late
      ? [
          `Softmax of ${over}, over ${terms.length} scores with maximum ${show(highest)}: ` +
            `e^(${show(z)} − ${show(highest)}) / ${show(sum)} = ${show(weight)}.`,
        ]
      : []),
    ...(late && !unmasked ? [s <= t ? "Mask: kept." : "Mask: set to 0."] : []),
    `Weight: ${show(late && !sees(t, s) ? 0 : weight)}. The model has ${show(look.pattern[block][head][t][s])}.`,
  ];
}
