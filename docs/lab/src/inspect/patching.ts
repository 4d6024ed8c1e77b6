import { clamp } from "../page/dom";
import { cells, CHARACTER_PIXELS, draw, signed, valueScale } from "./charts";
import { logProbability, Pass, softmax, type Model } from "./decoder";
import { dark, format, make, percent } from "./page";
import { inTasks, isRead, largest, LONGEST_TEXT } from "./tasks";
import type { View } from "./view";

// A second text beside the first: what the model computes differently for it, and activation patching, which takes a
// head's output, or the residual stream before a layer at one position, from the second text into the first.

// Most products with weights of all patches that are computed unasked, milliseconds for which what they depend on must
// stay the same before, and likeliest next tokens of each text that are shown.
const [FEW_PRODUCTS, SETTLED_MS, COMPARED_TOKENS] = [1.2e10, 400, 5];
// Bounds of a cell's width in a map, the least with a label above, the height of all, and letters of a label.
const PATCH_CELLS = { least: 4, labelled: 12, most: 44, height: 24, letters: 12 };

// Length of a - b over the mean of the lengths of a and b.
function distance(a: Float32Array, b: Float32Array): number {
  let [difference, left, right] = [0, 0, 0];
  for (let i = 0; i < a.length; i++) {
    difference += (a[i] - b[i]) ** 2;
    left += a[i] ** 2;
    right += b[i] ** 2;
  }
  return difference ? (2 * Math.sqrt(difference)) / (Math.sqrt(left) + Math.sqrt(right)) : 0;
}

export const streamAt = (pass: Pass, block: number, t: number) => pass.stream[block].subarray(t * pass.width(block), (t + 1) * pass.width(block));

const largestOf = (rows: (number | null)[][]) => rows.flat().reduce((most: number, x) => Math.max(most, Math.abs(x ?? 0)), 0);

// Products with weights that `patchAll` computes.
function patchProducts({ size, config: { n_blocks: L, n_heads: H } }: Model, at: number): number {
  const positions = ((at + 1) * (at + 2)) / 2 + H * (at + 1); // of all patches before a block
  return (size * positions * (L + 1)) / 2; // of which each is computed from its block on
}

/** Changes of a log-probability, null where they are not yet computed. */
interface Effects {
  heads: (number | null)[][];
  stream: (number | null)[][];
}

// Compute how much each patch changes the log-probability `base` of a token after position `at`: `heads[block][head]`
// with a head's output from the second text at all positions that both have, `stream[block][t]` with the stream before a
// block at position t. `pass` is overwritten. Yield between parts.
export function* patchAll(
  pass: Pass,
  tokens: number[],
  second: Pass,
  { at, token, base }: { at: number; token: number; base: number },
  { heads, stream }: Effects,
): Generator {
  const { n_blocks: L, n_heads: H } = pass.model.config;
  const text = tokens.slice(0, at + 1);

  function* recompute(block: number, first: number): Generator<void, number> {
    const few = pass.model.positionsAtOnce;
    for (let start = first; start <= at; start += few) {
      yield;
      for (let i = block; i < L; i++) pass.computeBlock(i, start, Math.min(start + few, at + 1));
    }
    return logProbability(pass.logits(at), token) - base;
  }

  // From the last block on: so the stream before a block is the text's own.
  pass.tokens = []; // what an earlier call left is no cache
  yield* pass.read(text);
  for (let block = L - 1; block >= 0; block--) {
    for (let head = 0; head < H; head++) {
      pass.edits = new Map([[`${block}.${head}`, second.output(block, head)]]);
      heads[block][head] = yield* recompute(block, 0);
    }
  }
  // And from the last position on: so keys and values before a position are the text's own.
  pass.tokens = [];
  yield* pass.read(text);
  const own = pass.stream.map((rows) => rows.slice());
  for (let t = Math.min(at, second.tokens.length - 1); t >= 0; t--) {
    own.forEach((rows, block) => pass.stream[block].set(rows));
    for (let block = L - 1; block >= 0; block--) {
      pass.stream[block].set(streamAt(second, block, t), t * pass.width(block));
      stream[block][t] = yield* recompute(block, t);
    }
  }
}

export function makePatching(container: HTMLElement, view: View) {
  const opener = make("button", container, "Compare with a second text", "plain");
  opener.setAttribute("aria-expanded", "false");
  const box = make("div", container, "", "both");
  box.hidden = true;
  let comparison: ReturnType<typeof makeComparison> | null = null;
  opener.addEventListener("click", () => {
    box.hidden = !box.hidden;
    opener.setAttribute("aria-expanded", String(!box.hidden));
    if (box.hidden) return;
    comparison ??= makeComparison(box, view);
    comparison.draw();
    box.querySelector("textarea")!.focus();
  });
  return { draw: () => { if (!box.hidden) comparison?.draw(); } };
}

function makeComparison(box: HTMLElement, view: View) {
  const { model, tokenizer, full, label, quoted, shade } = view;
  const { n_blocks: L, n_heads: H, value_dim: J } = model.config;
  const area = make("textarea", make("label", box, "Second text", "field"));
  [area.rows, area.spellcheck, area.autocapitalize, area.maxLength] = [2, false, "off", LONGEST_TEXT];
  const status = make("p", box, "", "status");
  status.setAttribute("aria-live", "polite");
  const pairs = make("ol", box, "", "pairs");
  pairs.setAttribute("aria-label", "Tokens of the first text above those of the second");
  const results = make("div", box);
  const columns = (n: number) => {
    const row = make("div", results, "", "columns");
    return Array.from({ length: n }, () => make("div", row));
  };
  const [[next, about], [apart, streams], [changes, heads]] = [columns(2), columns(2), columns(2)];
  changes.className = "changes";
  make("h3", about, "Activation patching");
  make("p", about, "Choose a cell of the maps on the effect of patching, by a click or the Enter key: the first text is computed again with that activation from the second text.", "name");
  const told = make("p", about, "", "told");
  told.setAttribute("aria-live", "polite");
  const remove = make("button", about, "Remove the patch", "plain");
  const progress = make("p", about, "", "status");
  const compute = make("button", about, "", "plain");

  const [second, patched, swept] = [1, 2, 3].map(() => new Pass(model)); // the first text with a patch, and with all in turn
  const stop: Record<"second" | "patched" | "swept", () => void> = { second() {}, patched() {}, swept() {} }; // what is being computed
  let [tokens, others, n, at, shown]: [number[], number[], number, number, string] = [[], [], 0, 0, ""]; // of both texts; positions of both, one of them; what is shown
  let [target, patch]: [number, string | null] = [0, null]; // the next token whose probability is patched, and the name of the edit
  let [base, whole, effects]: [number, number, Effects] = [0, 0, { heads: [], stream: [] }]; // its log-probability, change to the second text, and changes by all patches
  const maps: { repaint: () => void; remove: () => void; mark: () => void }[] = []; // what is drawn of them

  area.value = view.text;
  area.addEventListener("input", update);
  remove.addEventListener("click", () => { choosePatch(null); about.focus(); });
  compute.addEventListener("click", patchAllAndShow);
  about.tabIndex = -1;

  // Read the second text, and show both; a first text that is not yet computed is drawn when it is.
  function update() {
    stop.second();
    if (!isRead(view)) return;
    others = tokenizer.encode(area.value).slice(0, model.maxTokens);
    stop.second = inTasks(second.read(others), {
      progress() { [status.textContent, shown] = ["Computing the second text …", ""]; },
      done: show,
    });
  }

  function show() {
    if (!isRead(view)) return; // it has changed meanwhile
    tokens = view.tokens;
    n = Math.min(tokens.length, others.length);
    at = Math.min(view.position, n - 1);
    const key = [model.loads, tokens, others, at, dark.matches].join(";");
    if (key === shown) return; // as after a change of head
    stop.patched();
    stop.swept();
    shown = key;
    results.hidden = !drawPairs();
    if (results.hidden) return;
    const [p, q] = [full, second].map((pass) => softmax(pass.logits(at)));
    const changes = p.map((x, i) => Math.abs(x - q[i]));
    [target] = largest(changes.some(Boolean) ? changes : p, 1);
    if (patch && Number(patch.split("@")[1] ?? 0) >= n) patch = null;
    chooseTarget(target);
    drawMaps();
    choosePatch(patch);
  }

  // Choose the next token whose probability is patched, and compute all patches anew, at once where that is quick.
  function chooseTarget(token: number): void {
    target = token;
    stop.swept();
    const [first, other] = [full, second].map((pass) => logProbability(pass.logits(at), target));
    [base, whole] = [first, other - first];
    effects = { stream: Array.from({ length: L }, () => new Array(n).fill(null)), heads: Array.from({ length: L }, () => new Array(H).fill(null)) };
    for (const { repaint } of maps) repaint();
    const products = patchProducts(model, at);
    compute.hidden = products <= FEW_PRODUCTS;
    compute.textContent = "Compute all patches";
    progress.textContent = compute.hidden ? "" : `They take as much computation as ${format(Math.round(products / model.size / (at + 1)))} readings of the text.`;
    if (!compute.hidden) return;
    const settled = setTimeout(patchAllAndShow, SETTLED_MS);
    stop.swept = () => clearTimeout(settled);
  }

  function patchAllAndShow() {
    compute.hidden = true;
    const all = [...effects.heads, ...effects.stream];
    const [count, ofToken] = [L * (H + at + 1), `on the log-probability of ${quoted(target)} after position ${at}`];
    const show = (text: string) => {
      progress.textContent = text;
      for (const { repaint } of maps) repaint();
    };
    stop.swept = inTasks(patchAll(swept, tokens, second, { at, token: target, base }, effects), {
      progress: () => show(`Effects ${ofToken}: ${all.flat().filter((x) => x !== null).length} of ${count} computed …`),
      done() {
        const [ofStream, ofHeads] = [effects.stream, effects.heads].map((rows) => largestOf(rows).toFixed(3));
        show(`The maps show the effects ${ofToken}; the strongest colour is ${ofStream} nats for the stream, ${ofHeads} for heads.`);
      },
    });
  }

  // Show the tokens of both texts, and return at how many positions that both have they differ.
  function drawPairs() {
    pairs.replaceChildren();
    const length = Math.max(tokens.length, others.length);
    let different = 0;
    for (let t = 0; t < length; t++) {
      const isSame = tokens[t] === others[t];
      if (t < n && !isSame) different++;
      const pair = make("li", pairs, "", [isSame ? "" : "differs", t === at ? "from" : ""].join(" ").trim());
      for (const text of [tokens, others]) make("span", pair, t < text.length ? label(text[t]) : "–");
    }
    const number = (count: number, name: string) => (count === 1 ? `one ${name}` : `${count} ${name}s`);
    const counts = tokens.length === others.length ? `Both texts have ${number(n, "token")}` : `The texts have ${tokens.length} and ${others.length} tokens, of which the first ${n === 1 ? "is" : `${n} are`} compared`;
    const differences = different ? `differ at ${number(different, "position")}` : "are the same: change the second text";
    const beyond = at < view.position ? `; the first text's position ${view.position} has no counterpart` : "";
    status.textContent = n ? `${counts}; they ${differences}${beyond}.` : `The ${tokens.length ? "second" : "first"} text is empty.`;
    return different;
  }

  const named = (t: number) => (tokens[t] === others[t] ? quoted(tokens[t]) : `${quoted(tokens[t])} and ${quoted(others[t])}`);

  // Probabilities of next tokens of both texts, and of the first with the patch.
  function drawNext() {
    const isWithin = next.contains(document.activeElement);
    next.replaceChildren();
    make("h3", next, `Next token after position ${at}, ${named(at)}`);
    const all = [full, second, ...(patch ? [patched] : [])].map((pass) => softmax(pass.logits(at)));
    const tokens = new Set([...all.flatMap((p) => largest(p, COMPARED_TOKENS)), target]);
    const table = make("table", next);
    const head = make("tr", make("thead", table));
    for (const name of ["token", "first text", "second text", "first, patched"].slice(0, all.length + 1)) make("th", head, name).scope = "col";
    const body = make("tbody", table);
    for (const token of [...tokens].sort((a, b) => all[0][b] - all[0][a])) {
      const line = make("tr", body);
      const name = make("th", line);
      name.scope = "row";
      const button = make("button", name, label(token), "plain");
      button.setAttribute("aria-pressed", String(token === target));
      button.addEventListener("click", () => {
        chooseTarget(token);
        drawNext();
        tell();
      });
      if (isWithin && token === target) button.focus();
      for (const p of all) make("td", line, percent(p[token])).style.background = shade(p[token]);
    }
    make("p", next, "Choose the token whose log-probability the maps of patches show.", "name");
  }

  // Compute the first text with an edit from the second, or without.
  function choosePatch(name: string | null): void {
    patch = name;
    stop.patched();
    remove.hidden = !patch;
    for (const { mark } of maps) mark();
    const finish = () => { drawNext(); tell(); };
    if (!patch) return finish();
    const [block, head] = patch.split(/[.@]/).map(Number);
    const value = patch.includes("@") ? streamAt(second, block, head).slice() : second.output(block, head).subarray(0, n * J);
    stop.patched = inTasks(patched.read(tokens, new Map([[patch, value]])), {
      progress() { told.textContent = "Computing the first text with the patch …"; },
      done: finish,
    });
  }

  function tell() {
    const difference = `From the first text to the second, the log-probability of ${quoted(target)} after position ${at} changes by ${signed(whole)} nats`;
    told.textContent = patch ? `${difference}; with the ${nameOf(patch)} from the second text, by ${changed(logProbability(patched.logits(at), target) - base)}.` : `${difference}.`;
  }

  const changed = (x: number) => `${signed(x)} nats${Math.abs(whole) < 0.005 ? "" : ` (${Math.round((100 * x) / whole)}\u00a0% of it)`}`;
  function nameOf(patch: string): string {
    const [block, other] = patch.split(/[.@]/);
    return patch.includes("@") ? `residual stream before layer ${block} at position ${other}` : `output of head ${other} of layer ${block}`;
  }

  const layers = (before = "") => Array.from({ length: L }, (_, block) => `${before}layer ${block}`);
  const headNames = Array.from({ length: H }, (_, head) => `head ${head}`);
  function positionNames() {
    const short = (token: number) => (label(token).length > PATCH_CELLS.letters ? `${label(token).slice(0, PATCH_CELLS.letters - 1)}…` : label(token));
    return Array.from({ length: n }, (_, t) => (tokens[t] === others[t] ? short(tokens[t]) : `${short(tokens[t])}/${short(others[t])}`));
  }

  function drawMaps() {
    for (const { remove } of maps.splice(0)) remove();
    const rows = [...layers("before "), `after layer ${L - 1}`];
    const stream = rows.map((_, block) => Array.from({ length: n }, (_, t) => distance(streamAt(full, block, t), streamAt(second, block, t))));
    drawMap(apart, {
      title: "Distance of the residual streams", rows, columns: positionNames(), values: stream,
      about: "Length of the difference over the mean length of both.",
      told: (block, t) => `${rows[block]}, position ${t}, ${named(t)}: ${format(stream[block][t], 3)}`,
    });
    const each = (f: (block: number, head: number) => number) => Array.from({ length: L }, (_, block) => headNames.map((_, head) => f(block, head)));
    const [weights, outputs] = [
      each((block, head) => full.row(block, head, at).subarray(0, at + 1).reduce((sum, w, s) => sum + Math.abs(w - second.row(block, head, at)[s]) / 2, 0)),
      each((block, head) => {
        const [a, b] = [full, second].map((pass) => pass.output(block, head).subarray(at * J, (at + 1) * J));
        return distance(a, b);
      }),
    ];
    changes.replaceChildren();
    const ofHead = (values: number[][], text: (value: number) => string) => (block: number, head: number) => `head ${head} of layer ${block}: ${text(values[block][head])}`;
    drawMap(make("div", changes), {
      title: `Change of attention from position ${at}`, rows: layers(), columns: headNames, values: weights,
      about: "The attention weight that moves to other positions.", told: ofHead(weights, percent),
    });
    drawMap(make("div", changes), {
      title: `Distance of the heads' outputs at position ${at}`, rows: layers(), columns: headNames, values: outputs,
      about: "As for the residual stream.", told: ofHead(outputs, (x) => format(x, 3)),
    });
    const effect = (part: keyof Effects, row: number, column: number) => {
      const change = effects[part][row][column];
      return change === null ? "not computed" : changed(change);
    };
    drawMap(streams, {
      title: "Effect of patching the residual stream", rows: layers("before "), columns: positionNames(), part: "stream",
      about: "Change of the log-probability, with the stream of the second text at one position: orange raises it, blue lowers it.",
      told: (block, t) => `before layer ${block}, position ${t}, ${named(t)}: ${effect("stream", block, t)}`, name: (block, t) => `${block}@${t}`,
    });
    drawMap(heads, {
      title: "Effect of patching a head", rows: layers(), columns: headNames, part: "heads",
      about: "The same, with the output of a head for the second text, at all positions that both texts have.",
      told: (block, head) => `head ${head} of layer ${block}: ${effect("heads", block, head)}`, name: (block, head) => `${block}.${head}`,
    });
  }

  // Draw a map of values, or of a part of the effects, below its heading. The cells of effects name their patches: they
  // can be chosen, and the present one is marked.
  function drawMap(
    parent: HTMLElement,
    { title, about, rows, columns, values, part, told, name }: {
      title: string;
      about: string;
      rows: string[];
      columns: string[];
      values?: number[][];
      part?: keyof Effects;
      told: (row: number, column: number) => string;
      name?: (row: number, column: number) => string;
    },
  ): void {
    const shown = () => (part ? effects[part] : values ?? []);
    parent.replaceChildren();
    make("h3", parent, title);
    make("p", parent, about, "name");
    const letters = (names: string[]) => Math.max(...names.map((name) => name.length));
    const labels = CHARACTER_PIXELS * (letters(rows) + 0.72 * letters(columns)) + 24;
    const width = clamp((parent.clientWidth - labels) / columns.length, PATCH_CELLS.least, PATCH_CELLS.most);
    const { overlay, repaint, remove } = cells(parent, {
      title, rows, columns, cell: [width, PATCH_CELLS.height], gap: width > 7, columnLabels: width >= PATCH_CELLS.labelled,
      value: (row, column) => shown()[row][column],
      scale: () => valueScale(Math.max(largestOf(shown()), 1e-4), Boolean(part)), told, picked: name && ((row, column) => choosePatch(name(row, column))),
    });
    const mark = () => {
      overlay.querySelector(".patched")?.remove();
      const [row, column] = patch?.split(/[.@]/).map(Number) ?? [];
      if (patch && name?.(row, column) === patch) draw("rect", overlay, { class: "patched", x: column * width, y: row * PATCH_CELLS.height, width, height: PATCH_CELLS.height });
    };
    maps.push({ repaint, remove, mark });
  }

  return { draw: update };
}
