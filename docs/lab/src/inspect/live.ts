import { clamp, colour as rgb, visible } from "../page/dom";
import { makeAblation } from "./ablation";
import { makeAttribution } from "./attribution";
import { makeBlock } from "./block";
import { cells, CHARACTER_PIXELS, makeScaleBar, paint, valueScale, weightScale } from "./charts";
import { logSumExp, Model, Pass, softmax, type Config, type Edits } from "./decoder";
import { makeDrill } from "./drill";
import { film } from "./film";
import { colour, dark, drawEach, format, make, percent, rove } from "./page";
import { makePatching } from "./patching";
import { largest, LONGEST_TEXT, sample, TASK_MS } from "./tasks";
import { Tokenizer } from "./tokenizer";
import type { View } from "./view";
import { offer, toBytes, type Packed } from "./weights";

// What is shown of a decoder in the page (`decoder.ts`) and of its tokens (`tokenizer.ts`).

// Products with weights of an update that is announced before it begins, and milliseconds of rest before the lens of a
// large model is computed.
const [LONG_PRODUCTS, LENS_MS] = [4e8, 100];
// Next tokens that are shown, likeliest tokens per layer, keys that the note names, and bounds of the map's cells.
const [NEXT_TOKENS, LENS_TOKENS, NAMED_KEYS, MAP_CELLS] = [7, 3, 4, { least: 1, labelled: 13, most: 34, letters: 10 }];

/** A model, its tokenizer and a text, as `live.py` packs them. */
interface Data extends Packed {
  config: Config;
  max_tokens: number;
  tokenizer: ConstructorParameters<typeof Tokenizer>[0];
  text: string;
  size: number;
  files?: string[];
}

export function live(container: HTMLElement, data: Data): void {
  const { text, film: filmed } = data; // all that is read of it later, but by a film: weights are not kept twice
  const [model, tokenizer] = [new Model(data), new Tokenizer(data.tokenizer)];
  const { n_blocks: L, n_heads: H, n_kv_heads: G, head_dim: K, value_dim: J, has_lens } = model.config;
  const label = (token: number) => tokenizer.label(token);
  const quoted = (token: number) => `“${label(token)}”`;
  const full = new Pass(model); // with all heads
  const ablated = new Pass(model); // without those in `off`
  const off: Edits = new Map(); // ablated heads, as edits of a pass
  let [typed, generated, tokens]: [string, number[], number[]] = ["", [], []]; // the text as typed, the tokens added to it, the tokens of both
  let [position, pinned, chosen, computed]: [number, boolean, [number, number], number] = [0, false, [0, 0], 0]; // `computed` positions by the last update
  let frame = 0; // animation frame that will read what was typed
  let version = 0; // number of updates, from their beginning
  let lensTimer = 0; // of the lens of a large model
  let [job, timer]: [Generator<[number, number], number> | null, number] = [null, 0]; // the computation of what was read, until it is shown, and what continues it
  const active = () => (off.size ? ablated : full);
  let ink: number[] = []; // colour of attention, read once per update: reading it makes the browser compute styles
  const shade = (weight: number) => `rgba(${ink}, ${Math.sqrt(weight) / 2})`;

  if (filmed.length) makeFilm({ ...data, weights: toBytes(data.weights) });
  const field = make("label", container, "Your text", "field");
  const area = make("textarea", field);
  [area.rows, area.spellcheck, area.autocapitalize, area.maxLength] = [3, false, "off", LONGEST_TEXT];
  const controls = make("div", container, "", "controls");
  const add = (text: string, title: string, pick: (logits: Float32Array) => number) => {
    const button = make("button", controls, text);
    button.title = title;
    const logits = () => active().logits(tokens.length - 1).subarray(0, tokenizer.tokenBytes.length); // of tokens with a text
    button.addEventListener("click", () => append(pick(logits())));
    return button;
  };
  const steps = [
    add("Append the most likely token", "one greedy decode step", (logits) => largest(logits, 1)[0]),
    add("Sample a token", "one decode step that samples", (logits) => sample(logits, Number(temperature.value))),
  ];
  const temperature = make("input", make("label", controls, "at temperature "));
  Object.assign(temperature, { type: "number", min: 0, max: 5, step: 0.1, value: 0.8, title: "0 is greedy" });
  temperature.addEventListener("change", () => { temperature.value = String(temperature.value === "" ? 0.8 : clamp(Number(temperature.value), 0, 5)); });
  const again = make("button", controls, "Start again");
  const status = make("p", container, "", "status");
  const strip = make("div", container, "", "tokens");
  const note = make("p", container, "", "note");
  const predictions = make("div", container, "", "columns");
  const next = make("div", predictions);
  const lens = has_lens ? makeLens(make("div", predictions)) : null;
  const attention = make("div", container, "", "columns");
  const [heads, map] = [make("div", attention, "", "heads"), make("div", attention, "", "map")];
  const layer = make("div", container, "", "columns");
  const [block, cache] = [make("div", layer, "", "block"), make("div", layer, "", "cache")];
  const tiles = makeTiles();
  // What a panel, which is made in a file of its own, reads; `draw` follows each change of text, position or head.
  const view: View = {
    model, tokenizer, full, off, active, label, quoted, shade,
    get text() { return area.value; },
    get tokens() { return tokens; },
    get position() { return position; },
    get chosen() { return chosen; },
    get version() { return version; },
  };
  const attribution = makeAttribution(make("div", predictions, "", "attribution panel"), view);
  const drill = makeDrill(make("div", attention, "", "drill panel"), view);
  const ablation = makeAblation(heads, view);
  const panels = [makeBlock(block, view), attribution, drill, ablation, makePatching(make("div", container, "", "patching"), view)];
  let drawnMap: ReturnType<typeof cells> | null = null;

  // A slider over the steps whose parameters the page has.
  function makeFilm(data: Data): void {
    let shown = filmed.length - 1;
    make("p", container, "The slider chooses the step of training whose parameters read your text.", "name");
    film(container, { steps: filmed, moved({ index }) {
      if (index === shown) return;
      shown = index;
      model.load(data, index);
      update(position);
    } });
  }

  // Read the text, compute, and show all of it, and what follows a position. What takes long lets the page go on
  // between its parts, and gives way to the next update.
  function update(at = Infinity) {
    clearTimeout(timer);
    version++;
    const start = performance.now();
    let isAnnounced = false;
    const all = [...tokenizer.encode(typed), ...generated];
    tokens = all.slice(0, model.maxTokens);
    job = compute();
    work();

    function* compute() {
      const n = yield* full.read(tokens);
      return off.size ? Math.max(n, yield* ablated.read(tokens, off)) : n;
    }

    function work() {
      const begun = performance.now();
      for (;;) {
        const part = job!.next();
        if (part.done === true) return show(part.value);
        const [n, total] = part.value as [number, number];
        const isLong = !isAnnounced && total * model.size > LONG_PRODUCTS;
        if (!isLong && performance.now() - begun < TASK_MS) continue;
        isAnnounced = true;
        setBusy(true);
        status.textContent = `Computing: ${n} of ${total} positions …`;
        timer = setTimeout(work);
        return;
      }
    }

    function show(n: number) {
      [job, computed] = [null, n];
      setBusy(false);
      showAll(all.length, performance.now() - start);
      pinned &&= at < tokens.length;
      if (tokens.length) select(Math.min(at, tokens.length - 1));
      else drawPanels();
    }
  }

  // Buttons that add a token keep the focus meanwhile, which `disabled` would take.
  function setBusy(isBusy: boolean): void {
    container.ariaBusy = String(isBusy);
    for (const button of steps) button.ariaDisabled = String(isBusy);
  }

  // Show all but what depends on a position, for a text of n tokens that took some milliseconds.
  function showAll(n: number, time: number): void {
    ink = colour("--look").split(",").map(Number);
    const counts = [`${tokens.length} of at most ${model.maxTokens} tokens`];
    if (n > tokens.length) counts[0] = `${format(n)} tokens, of which the model uses the first ${model.maxTokens}`;
    const lacking = tokenizer.lacking(typed);
    if (lacking !== undefined) counts.push(`${visible(lacking)} has no token, and is left out`);
    if (tokens.length) counts.push(`${computed} computed in ${time.toFixed(1)} ms, ${tokens.length - computed} read from the cache`);
    if (tokens.length > 1) counts.push(`loss ${full.loss().toFixed(3)} nats per token`);
    if (tokens.length > 1 && off.size) counts[counts.length - 1] += `, ${ablated.loss().toFixed(3)} with ${off.size === 1 ? "the head" : `the ${off.size} heads`} ablated`;
    status.textContent = `${counts.join("; ")}.`;
    for (const button of steps) button.disabled = !tokens.length || n >= model.maxTokens;
    strip.replaceChildren();
    tokens.forEach((token, at) => {
      const button = make("button", strip, label(token));
      [button.dataset.at, button.tabIndex] = [String(at), at === tokens.length - 1 ? 0 : -1];
      if (label(token).endsWith("⏎")) strip.append("\n");
    });
    for (const part of [note, predictions, attention, layer]) part.hidden = !tokens.length;
    if (!tokens.length) return;
    for (const tile of tiles) tile.paint();
    drawMap();
    drawCache();
  }

  function append(token: number): void {
    if (job || steps[0].disabled) return; // by what was typed just before the click
    generated.push(token);
    area.value = typed + tokenizer.decode(generated);
    update();
    area.scrollTop = area.scrollHeight;
  }

  // Show what follows a position, and where the chosen head looks from there.
  function select(at: number): void {
    if (job) return; // the tokens shown are of another text
    position = at;
    const [block, head] = chosen;
    const row = active().row(block, head, at);
    for (const button of strip.querySelectorAll("button")) {
      const key = Number(button.dataset.at);
      button.classList.toggle("from", key === at);
      button.style.background = shade(row[key]);
    }
    const named = largest(row.subarray(0, at + 1), NAMED_KEYS).filter((key) => row[key] >= 0.0005);
    const keys = named.map((key) => `${quoted(tokens[key])} ${percent(row[key])}`).join(", ");
    note.setAttribute("aria-live", document.activeElement === area ? "off" : "polite");
    const switched = off.has(chosen.join(".")) ? ", which is ablated," : "";
    note.textContent = `Position ${at}, ${quoted(tokens[at])}: head ${head} of layer ${block}${switched} attends to ${keys}.`;
    drawNext();
    if (lens) drawLensLater(lens);
    drawPanels();
  }

  function drawPanels() {
    for (const panel of panels) panel.draw();
  }

  function drawNext() {
    const buttons = () => [...next.querySelectorAll("button")];
    const focused = buttons().indexOf(document.activeElement as HTMLButtonElement);
    next.replaceChildren();
    make("h3", next, `Next token after ${quoted(tokens[position])}`);
    const [before, after] = [softmax(full.logits(position)), off.size ? softmax(ablated.logits(position)) : null];
    const [actual, isLast] = [tokens[position + 1], position === tokens.length - 1];
    const shown = new Set([...largest(before, NEXT_TOKENS), ...(after ? largest(after, NEXT_TOKENS) : [])]);
    if (!isLast) shown.add(actual);
    const list = make("ul", next, "", after ? "bars compared" : "bars");
    for (const token of [...shown].sort((a, b) => before[b] - before[a])) {
      const line = make("li", list, "", token === actual ? "marked" : "");
      const name = make("button", line, label(token), "label");
      name.disabled = !isLast || steps[0].disabled;
      name.title = name.disabled ? "" : "append this token";
      name.addEventListener("click", () => append(token));
      const tracks = make("span", line, "", "tracks");
      const values = after ? [before[token], after[token]] : [before[token]];
      for (const p of values) make("span", make("span", tracks, "", "track"), "", "bar").style.width = `${100 * p}%`;
      make("span", line, values.map(percent).join(" → "), "value");
      const why = make("button", line, "why?", "why");
      why.setAttribute("aria-label", `why ${quoted(token)}?`);
      why.addEventListener("click", () => { if (!job) attribution.ask({ position, token }); });
      if (token === actual) make("span", line, "in the text", "mark");
    }
    if (after) make("p", next, "Above: all heads; below: with the selected heads ablated.", "name");
    else if (isLast) make("p", next, "Click to append the token.", "name");
    buttons()[focused]?.focus();
  }

  function makeLens(place: HTMLElement) {
    const [title, box] = [make("h3", place), make("div", place, "", "stack")];
    [box.tabIndex, box.role, box.ariaLabel] = [0, "region", "Logit lens"];
    make("p", place, "The most likely next tokens, were the residual stream unembedded after each layer.", "name");
    return { place, title, box };
  }

  // The lens of a large model waits until the other results are shown, and for the pointer to rest.
  function drawLensLater(lens: ReturnType<typeof makeLens>): void {
    clearTimeout(lensTimer);
    if ((L + 1) * model.parameters["embedding.W_E"].length <= LONG_PRODUCTS) return drawLens(lens);
    lens.place.ariaBusy = "true";
    lensTimer = setTimeout(() => drawLens(lens), LENS_MS);
  }

  function drawLens({ place, title, box }: ReturnType<typeof makeLens>): void {
    if (job) return; // which ends by drawing it
    place.ariaBusy = "false";
    title.textContent = `Logit lens after ${quoted(tokens[position])}`;
    box.replaceChildren();
    const body = make("tbody", make("table", box));
    const logits = active().lens(position);
    const V = logits.length / (L + 1);
    for (let block = 0; block <= L; block++) {
      const line = make("tr", body);
      make("th", line, block === 0 ? "embedding" : `layer ${block - 1}`).scope = "row";
      const row = logits.subarray(block * V, (block + 1) * V);
      const total = logSumExp(row);
      for (const token of largest(row, LENS_TOKENS)) {
        const cell = make("td", line);
        const guess = make("div", cell, "", "guess");
        cell.style.background = shade(Math.exp(row[token] - total));
        make("span", guess, label(token));
        make("span", guess, percent(Math.exp(row[token] - total)), "share");
      }
    }
  }

  // A row per layer, in a box that scrolls; a tile per head: its attention map to choose it by, and its switch.
  function makeTiles() {
    make("h3", heads, "Heads");
    make("p", heads, "Select a head to see its attention; clear its box to ablate it (zero ablation).", "name");
    const box = make("div", heads, "", "stack");
    box.style.setProperty("--heads", String(H));
    make("span", box, "head");
    for (let head = 0; head < H; head++) make("span", box, String(head), "head");
    const made = [];
    for (let block = 0; block < L; block++) {
      make("span", box, `layer ${block}`);
      for (let head = 0; head < H; head++) made.push(makeTile(make("div", box, "", "tile"), block, head));
    }
    return made;
  }

  function makeTile(tile: HTMLElement, block: number, head: number) {
    const button = make("button", tile);
    button.setAttribute("aria-label", `attention of head ${head} of layer ${block}`);
    button.setAttribute("aria-pressed", String(block === 0 && head === 0));
    const canvas = make("canvas", button);
    button.addEventListener("click", () => {
      for (const other of heads.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
      chosen = [block, head];
      if (job) return; // which ends by drawing it
      drawMap();
      drawCache();
      select(position);
      map.scrollIntoView({ block: "nearest" });
    });
    for (const event of ["pointerenter", "focusin"]) tile.addEventListener(event, () => ablation.point(`${block}.${head}`));
    const name = make("label", tile);
    const box = make("input", name);
    [box.type, box.checked] = ["checkbox", true];
    box.setAttribute("aria-label", `head ${head} of layer ${block}`);
    const show = () => {
      const isOff = off.has(`${block}.${head}`);
      box.checked = !isOff;
      tile.classList.toggle("off", isOff);
      paintMap(canvas, block, head);
    };
    box.addEventListener("change", () => {
      if (box.checked) off.delete(`${block}.${head}`);
      else off.set(`${block}.${head}`, null);
      update(position);
    });
    return { paint: show };
  }

  // Opacity is the root of the weight, so that small ones show.
  function paintMap(canvas: HTMLCanvasElement, block: number, head: number): void {
    const T = tokens.length;
    [canvas.width, canvas.height] = [T, T];
    canvas.style.imageRendering = T > 64 ? "auto" : "pixelated";
    const context = canvas.getContext("2d")!;
    const image = context.createImageData(T, T);
    const pixels = new Uint32Array(image.data.buffer); // a byte each for red, green, blue and opacity, the first lowest
    const rgb = ink[0] | (ink[1] << 8) | (ink[2] << 16);
    for (let query = 0; query < T; query++) {
      const row = active().row(block, head, query);
      for (let key = 0; key <= query; key++) pixels[query * T + key] = rgb | (Math.round(255 * Math.sqrt(row[key])) << 24);
    }
    context.putImageData(image, 0, 0);
  }

  function drawMap() {
    const [block, head] = chosen;
    drawnMap?.remove();
    map.replaceChildren();
    make("h3", map, `Attention of head ${head} of layer ${block}`);
    make("p", map, "Queries are rows, keys are columns. Click a cell, or press Enter on it, for its arithmetic.", "name");
    const names = tokens.map((token) => {
      const text = label(token);
      return text.length > MAP_CELLS.letters ? `${text.slice(0, MAP_CELLS.letters - 1)}…` : text;
    });
    const margin = 40 + 1.72 * CHARACTER_PIXELS * Math.max(...names.map((name) => name.length)); // for both labels
    const side = clamp((map.clientWidth - margin) / tokens.length, MAP_CELLS.least, MAP_CELLS.most);
    const labels = side >= MAP_CELLS.labelled ? names : names.map(() => "");
    const [shown, rows] = [tokens, tokens.map((_, query) => active().row(block, head, query))];
    drawnMap = cells(map, {
      title: `attention of head ${head} of layer ${block}`, rows: labels, columns: labels, cell: [side, side], gap: side > 7,
      columnLabels: side >= MAP_CELLS.labelled,
      value: (query, key) => rows[query][key], scale: weightScale,
      told: (query, key) => `${quoted(shown[query])} (${query}) to ${quoted(shown[key])} (${key}): ${percent(rows[query][key])}`,
      chosen: (query) => { if (!pinned) select(query); },
      picked: (query, key) => { if (!job) drill.open([query, key]); },
    });
  }

  // Keys and values of the chosen head in all slots of the cache, a column each.
  function drawCache() {
    cache.replaceChildren();
    const [[block, head], pass, T, N] = [chosen, active(), tokens.length, model.maxTokens];
    const group = Math.floor(head / (H / G));
    make("h3", cache, "KV cache");
    const numbers = L * G * (K + J);
    const perPosition = Object.entries(model.parameters)
      .filter(([name]) => /W_(Q|K|V|O|out|gate|\d)/.test(name)).reduce((sum, [, array]) => sum + array.length, 0);
    const heads = `${G} ${G === 1 ? "head" : "heads"}${G < H ? ` (each serves ${H / G} heads of queries)` : ""}`;
    const multiplications = (n: number) => `${format(Number(((n * perPosition) / 1e6).toPrecision(3)))} million`;
    const saved = computed < T ? `, ${multiplications(computed)} multiplications with weights instead of ${multiplications(T)}` : "";
    const last = computed ? `computed ${computed === 1 ? "one position" : `${computed} positions`}, marked by the line below the columns${saved}` : "read all of them and computed none";
    make("p", cache, `${T} of ${N} slots hold a token, each with ${format(numbers)} numbers: keys ${K === J ? "" : `of width ${K} `}and values of width ${J} for ${heads} of ${L} ${L === 1 ? "layer" : "layers"}. The last update ${last}.`);
    const canvas = make("canvas", cache);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `keys and values of head ${head} of layer ${block}, ${T} of ${N} slots filled`);
    const parts = [pass.keys[block], pass.values[block]];
    const scales = parts.map((part) => {
      const filled = part.subarray(0, (T * part.length) / N);
      return valueScale(filled.reduce((a, b) => Math.max(a, Math.abs(b)), 1e-30), true);
    });
    const [accent, none] = [[...rgb("--accent"), 255], [0, 0, 0, 0]];
    paint(canvas, N, K + J + 3, (row, slot) => {
      if (slot >= T || row === K || row === K + J + 1) return none;
      if (row === K + J + 2) return slot >= T - computed ? accent : none;
      if (row < K) return scales[0].at(parts[0][(slot * G + group) * K + row]);
      return scales[1].at(parts[1][(slot * G + group) * J + row - K - 1]);
    });
    ["keys", "values"].forEach((name, i) => makeScaleBar(cache, name)(scales[i]));
    make("p", cache, `Keys above, values below, of head ${head} of layer ${block}; a column per slot.`, "name");
  }

  function readArea() {
    cancelAnimationFrame(frame);
    [frame, typed, generated] = [0, area.value, []];
    update();
  }
  function begin() {
    area.value = text;
    off.clear();
    readArea();
  }
  // Keys that come faster than frames are read together, and before what a click does.
  area.addEventListener("input", () => { frame ||= requestAnimationFrame(readArea); });
  container.addEventListener("click", () => { if (frame) readArea(); }, true);
  again.addEventListener("click", begin);
  const tokenAt = ({ target }: Event) => {
    const { at } = (target as HTMLElement).dataset;
    return at === undefined ? undefined : Number(at);
  };
  for (const name of ["pointerover", "focusin"]) {
    strip.addEventListener(name, (event) => {
      const at = tokenAt(event);
      if (at !== undefined && !pinned) select(at);
    });
  }
  rove(strip);
  strip.addEventListener("click", (event) => {
    const at = tokenAt(event);
    if (at === undefined) return;
    pinned = !(pinned && at === position);
    select(at);
  });
  strip.addEventListener("pointerleave", () => { if (!pinned) select(tokens.length - 1); });
  dark.addEventListener("change", () => update(position));
  let width = 0;
  new ResizeObserver(() => {
    if (map.clientWidth !== width && tokens.length && !job) drawMap();
    width = map.clientWidth;
  }).observe(container);
  begin();
}

drawEach("live", (container, data) => {
  if (data.files || data.bits === 8) return offer(container, data, (loaded) => live(container, loaded));
  const loading = make("p", container, "Loading the model …", "loading");
  new IntersectionObserver((entries, observer) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    setTimeout(() => { // the page is painted first
      live(container, data);
      loading.remove();
    });
  }, { rootMargin: "50%" }).observe(container);
});
