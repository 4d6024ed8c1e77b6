import { clamp, colour as rgb } from "../page/dom";
import { backward, dot, type Gradient } from "./backward";
import { cells, valueScale } from "./charts";
import { logSumExp, type Pass } from "./decoder";
import { makePanel } from "./drill";
import { format, make, percent, rove } from "./page";
import { TASK_MS } from "./tasks";
import type { View } from "./view";

// What a token's log-probability depends on, from its gradient (`backward.ts`): on tokens, heads, attention layers, MLPs.

// Rows of the table of the largest effects; milliseconds for which a text rests before its gradient follows it; and the
// most products with weights that follow it at all, where larger ones wait for a button.
const [LARGEST_EFFECTS, REST_MS, FOLLOWED_PRODUCTS] = [8, 150, 2e9];

/** A next token, and the position before it. */
interface Asked {
  position: number;
  token: number;
}

export function makeAttribution(container: HTMLElement, view: View) {
  const { n_heads: H, d_model: D, n_kv_heads: G, value_dim: J, embedding_scale } = view.model.config;
  const { heading, body: inner, open } = makePanel(container, () => ask(null));
  const status = make("p", inner, "", "name");
  status.setAttribute("role", "status");
  const body = make("div", inner);
  const signed = (value: number) => `${value > 0 ? "+" : ""}${format(value, 3)}`;
  let asked: Asked | null = null;
  let [version, timer] = [0, 0]; // the update of which the rest is shown
  let grid: ReturnType<typeof cells> | null = null;

  function draw() {
    if (asked && asked.position >= view.tokens.length) asked = null;
    container.hidden = !asked;
    if (!asked || version === view.version) return;
    clear();
    const { position, token } = asked;
    heading.textContent = `What ${view.quoted(token)} after ${view.quoted(view.tokens[position])} (${position}) depends on`;
    const isLong = 3 * (position + 1) * view.model.size > FOLLOWED_PRODUCTS;
    if (isLong && version) {
      status.textContent = "The text or the heads have changed. ";
      make("button", status, "Compute again", "plain").addEventListener("click", () => start(position, token));
    } else {
      timer = setTimeout(() => start(position, token), version ? REST_MS : 0);
    }
    version = view.version;
  }

  function clear() {
    clearTimeout(timer);
    grid?.remove();
    grid = null;
    for (const part of [status, body]) part.replaceChildren();
  }

  // Work in parts, between which the page goes on, until it is done or another update has begun.
  function start(position: number, token: number): void {
    const [begun, pass] = [performance.now(), view.active()];
    const job = backward(pass, position, token);
    const work = () => {
      const since = performance.now();
      for (;;) {
        if (!asked || version !== view.version) return;
        const part = job.next();
        if (part.done === true) return show(pass, asked, part.value, performance.now() - begun);
        if (performance.now() - since < TASK_MS) continue;
        const [n, total] = part.value as [number, number];
        const left = n ? `, ${format(((performance.now() - begun) / 1000) * (total / n - 1), 2)} s left` : "";
        status.textContent = `Computing the gradient: ${percent(n / total)}${left} …`;
        timer = setTimeout(work);
        return;
      }
    };
    work();
  }

  function show(pass: Pass, { position, token }: Asked, gradient: Gradient, time: number): void {
    const logits = pass.logits(position);
    status.textContent = `Its log-probability is ${format(logits[token] - logSumExp(logits))} nats. Computed backwards in ${time.toFixed(0)} ms.`;
    make("p", body, "Each number is the gradient of this log-probability times what a part puts out: to first order, what the log-probability would lose without the part. Orange parts make the token more likely, blue ones less. The estimate is for a small change; ablate a head to see the exact effect.", "name");
    drawTokens(gradient, position);
    const parts = make("div", body, "", "parts");
    drawParts(make("div", parts), gradient);
    drawLargest(make("div", parts), gradient);
  }

  function drawTokens({ embedding, tokenValues }: Gradient, position: number): void {
    const table = view.model.parameters["value_embedding.W_E"];
    const effects: number[] = [];
    const norms: number[] = [];
    for (let t = 0; t <= position; t++) {
      const d = embedding.subarray(t * D, (t + 1) * D);
      const dValues = table ? tokenValues.subarray(t * G * J, (t + 1) * G * J) : [];
      const values = table ? table.subarray(view.tokens[t] * G * J, (view.tokens[t] + 1) * G * J).map((x) => embedding_scale * x) : [];
      effects.push(dot(d, view.model.embed(view.tokens[t], t)) + dot(dValues, values));
      norms.push(Math.hypot(...d, ...dValues));
    }
    make("h4", body, "Tokens");
    const strip = make("div", body, "", "tokens");
    const told = make("p", body, "Point at a token for its numbers: the gradient times its embedding, and the norm of the gradient.", "name told");
    told.setAttribute("aria-live", "polite");
    const most = Math.max(...effects.map(Math.abs), 1e-30);
    effects.forEach((effect, t) => {
      const label = view.label(view.tokens[t]);
      const button = make("button", strip, label);
      button.tabIndex = t === position ? 0 : -1;
      button.style.background = `rgba(${rgb(effect < 0 ? "--minus" : "--plus")}, ${Math.sqrt(Math.abs(effect) / most) / 2})`;
      const tell = () => { told.textContent = `${view.quoted(view.tokens[t])} (${t}): gradient · embedding ${signed(effect)}, norm of the gradient ${format(norms[t], 3)}`; };
      for (const name of ["pointerover", "focus"]) button.addEventListener(name, tell);
      if (label.endsWith("⏎")) strip.append("\n");
    });
    rove(strip);
  }

  // A cell per head, attention layer and MLP.
  function drawParts(area: HTMLElement, { effects }: Gradient): void {
    const columns = [...Array.from({ length: H }, (_, h) => `head ${h}`), "attention", "MLP"];
    const rows = effects.map(({ heads, attention, mlp }) => [...heads, attention, mlp]);
    const most = Math.max(...rows.flat().map(Math.abs), 1e-30);
    make("h4", area, "Parts");
    grid = cells(area, {
      title: "gradient times output of heads, attention layers and MLPs", rows: rows.map((_, i) => `layer ${i}`), columns, cell: [clamp(area.clientWidth / (columns.length + 3), 18, 30), 22],
      value: (row, column) => rows[row][column], scale: () => valueScale(most, true),
      told: (row, column) => `layer ${row}, ${columns[column]}: ${signed(rows[row][column])}`,
    });
  }

  function drawLargest(area: HTMLElement, { effects }: Gradient): void {
    const all = effects.flatMap(({ heads, mlp }, i): [string, number][] => [...Array.from(heads, (effect, h): [string, number] => [`head ${h} of layer ${i}`, effect]), [`MLP of layer ${i}`, mlp]]);
    make("h4", area, "Largest effects");
    const lines = make("tbody", make("table", area));
    for (const [name, effect] of all.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, LARGEST_EFFECTS)) {
      const line = make("tr", lines);
      make("th", line, name).scope = "row";
      make("td", line, signed(effect), "number");
    }
  }

  // Show the gradient of the log-probability of a token after a position, or nothing.
  function ask(choice: Asked | null): void {
    clear();
    [asked, version] = [choice, 0];
    draw();
    if (choice) open();
  }
  return { draw, ask };
}
