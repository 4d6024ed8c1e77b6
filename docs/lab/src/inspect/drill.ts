import { Rows, type Pass } from "./decoder";
import { format, make, showScroll } from "./page";
import { largest } from "./tasks";
import type { View } from "./view";

// One weight of an attention map, down to the numbers that make it.

// Rows of the softmax that are shown: the largest, and the chosen one. The others are summed in one row.
const SOFTMAX_ROWS = 8;

// What a head of a pass makes of a query and a key: the vectors as used, and the scores and weights of the visible keys,
// the first of which is at `start`.
export function weightSteps(pass: Pass, block: number, head: number, query: number, key: number) {
  const { keys, values } = pass;
  const { d_model: D, n_heads: H, n_kv_heads: G, head_dim: K, value_dim: J, windows, scale, norm_placement } = pass.model.config;
  const group = Math.floor(head / (H / G));
  const stream = pass.stream[block].slice(query * D, (query + 1) * D);
  const rows = new Rows(pass, block, query, query + 1);
  const x = norm_placement === "post" ? stream : rows.norm(stream, "attention_norm");
  const q = rows.place(rows.linear(x, "attention", "Q"), "Q").slice(head * K, (head + 1) * K);
  const rowOf = (array: Float32Array[], width: number, position: number) => Float64Array.from(array[block].subarray((position * G + group) * width, (position * G + group + 1) * width));
  const products = (position: number) => rowOf(keys, K, position).map((value, k) => q[k] * value);
  const sum = (numbers: Float64Array) => numbers.reduce((a, b) => a + b, 0);
  const start = Math.max(0, query - windows[block] + 1);
  const scores = Float64Array.from({ length: query + 1 - start }, (_, i) => scale * sum(products(start + i)));
  const weights = pass.row(block, head, query).slice(start, query + 1);
  const output = new Float64Array(J);
  weights.forEach((weight, i) => rowOf(values, J, start + i).forEach((value, j) => { output[j] += weight * value; }));
  const [value, weight] = [rowOf(values, J, key), pass.row(block, head, query)[key]];
  return {
    q, k: rowOf(keys, K, key), products: products(key), sum: sum(products(key)), scale, start, scores, weights,
    weight, value, added: value.map((number) => weight * number), output,
  };
}

type Steps = ReturnType<typeof weightSteps>;

// A panel with a heading and a button that closes it and gives the focus back.
export function makePanel(container: HTMLElement, close: () => void) {
  const title = make("div", container, "", "title");
  const heading = make("h3", title);
  heading.setAttribute("aria-live", "polite");
  make("button", title, "Close", "plain").addEventListener("click", () => {
    close();
    if (opener?.isConnected) opener.focus();
  });
  let opener: HTMLElement | null = null;
  container.hidden = true;
  const open = () => {
    opener = document.activeElement as HTMLElement;
    container.hidden = false;
    container.scrollIntoView({ block: "nearest" });
  };
  return { heading, open, body: make("div", container) };
}

export function makeDrill(container: HTMLElement, view: View) {
  const { n_heads: H, n_kv_heads: G, head_dim: K, frequencies } = view.model.config;
  const norm = (numbers: ArrayLike<number> & Iterable<number>) => Math.hypot(...numbers);
  const named = (position: number) => `${view.quoted(view.tokens[position])} (${position})`;
  const { heading, body, open: reveal } = makePanel(container, () => open(null));
  let cell: [number, number] | null = null; // the query and the key
  let drawn = ""; // what is shown of them

  // A table in a box that scrolls where it is wider than the page.
  function addTable(title: string, kind: string): HTMLTableElement {
    const box = make("div", body, "", "wide");
    [box.tabIndex, box.role, box.ariaLabel] = [0, "region", title];
    const table = make("table", box, "", kind);
    showScroll(box);
    return table;
  }

  function drawVectors(title: string, rows: [string, Iterable<number>][]): void {
    const lines = make("tbody", addTable(title, "vectors"));
    for (const [name, numbers] of rows) {
      const line = make("tr", lines);
      make("th", line, name).scope = "row";
      for (const number of numbers) make("td", line, format(number), "number");
    }
  }

  function drawSoftmax({ start, scores, weights }: Steps, key: number): [number, number] {
    const highest = scores.reduce((a, b) => Math.max(a, b));
    const powers = scores.map((score) => Math.exp(score - highest));
    const shown = new Set(largest(weights, SOFTMAX_ROWS));
    if (key >= start && key < start + scores.length) shown.add(key - start);
    const table = addTable("Softmax of the scores", "softmax");
    const head = make("tr", make("thead", table));
    for (const name of ["key", "score", "e^(score − max)", "weight", ""]) make("th", head, name).scope = "col";
    const rows = make("tbody", table);
    const add = (name: string, numbers: (number | null)[], weight: number, isMarked = false) => {
      const line = make("tr", rows, "", isMarked ? "marked" : "");
      make("th", line, name).scope = "row";
      for (const number of numbers) make("td", line, number === null ? "" : format(number), "number");
      make("span", make("span", make("td", line), "", "track"), "", "bar").style.width = `${100 * weight}%`;
    };
    for (const i of [...shown].sort((a, b) => a - b)) add(named(start + i), [scores[i], powers[i], weights[i]], weights[i], start + i === key);
    const others = [...scores.keys()].filter((i) => !shown.has(i));
    const total = (numbers: ArrayLike<number>) => others.reduce((sum, i) => sum + numbers[i], 0);
    if (others.length) add(`${others.length} other${others.length > 1 ? "s" : ""}`, [null, total(powers), total(weights)], total(weights));
    return [highest, powers.reduce((a, b) => a + b)];
  }

  function draw() {
    const [block, head] = view.chosen;
    const state = JSON.stringify([cell, view.chosen, view.version]);
    if (cell && Math.max(...cell) >= view.tokens.length) cell = null;
    container.hidden = !cell;
    if (!cell || state === drawn) return;
    drawn = state;
    body.replaceChildren();
    const [query, key] = cell;
    const pass = view.active();
    const steps = weightSteps(pass, block, head, query, key);
    const { start, scores, weight, scale } = steps;
    const isVisible = key >= start && key <= query;
    heading.textContent = `One weight: ${named(query)} attends to ${named(key)}, head ${head} of layer ${block}`;
    const has = (name: string) => Boolean(view.model.parameters[`blocks_${block}.attention.${name}`]);
    const made = [has("gamma_Q") && "normalised (QK norm)", frequencies[block] && "rotated by their positions (RoPE)"].filter(Boolean).join(" and ");
    const group = G < H ? ` Key and value head ${Math.floor(head / (H / G))} serves ${H / G} query heads.` : "";
    make("p", body, `The query q comes from the residual stream at ${named(query)}, the key k from that at ${named(key)}, through W_Q and W_K${made ? `, ${made}` : ""}.${group}`, "name");
    drawVectors("Query, key and their products", [["q", steps.q], ["k", steps.k], ["q·k", steps.products]]);
    const list = make("ol", body, "", "arithmetic");
    make("li", list, `The sum of the ${K} products is ${format(steps.sum)}.`);
    const root = Math.abs(scale - K ** -0.5) < 1e-6 ? ` = 1/√${K}` : "";
    make("li", list, `Times the scale ${format(scale)}${root}, that is the score: ${format(scale * steps.sum)}.`);
    if (!isVisible) {
      make("li", list, key > query ? `The causal mask hides keys after the query (${key} > ${query}): the weight is 0.` : `The window of this layer begins at ${start}: earlier keys are hidden, and the weight is 0.`);
    }
    const softmaxStep = make("li", list);
    const [highest, total] = drawSoftmax(steps, key);
    softmaxStep.textContent = isVisible
      ? `The softmax divides by the sum over the ${scores.length} visible keys: e^(${format(scale * steps.sum)} − ${format(highest)}) / ${format(total)} = ${format(weight)}, the weight.`
      : `The softmax shares a weight of 1 among the ${scores.length} visible keys: e^(score − ${format(highest)}) / ${format(total)}.`;
    const isOff = view.off.has(`${block}.${head}`);
    const [share, whole] = [norm(steps.added), norm(steps.output)];
    make("p", body, `The value v of ${named(key)}, times the weight, is what this key adds to the head’s output: a vector of norm ${format(share)}; the output, the sum over all visible keys, has norm ${format(whole)}.${isOff ? " As the head is ablated, zeros take the place of this output." : ""}`, "name");
    drawVectors("Value, weighted value and the head’s output", [["v", steps.value], ["weight·v", steps.added], ["output", steps.output]]);
  }

  function open(at: [number, number] | null): void {
    cell = at;
    draw();
    if (at) reveal();
  }
  return { draw, open };
}
