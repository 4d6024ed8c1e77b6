import { DEFAULT_CONFIG, DEFAULT_TEXT, theory as theoryOf, type Config, type Fault, type Theory } from "../engine";
import { makeChart } from "./chart";
import { get, h, show } from "./dom";
import { chapterLink, makeExercises } from "./exercises";
import { FAULTS, NAMES } from "./faults";
import { Lane } from "./lane";
import { makeGradient, makeTable } from "./matrices";
import { makeLargeMap, makeMaps, makeSteps, type Selection } from "./maps";

/** Time between two drawings, and the most steps between them. */
const [DRAW_MILLISECONDS, MOST_STEPS] = [120, 10];
const [SHORTEST_TEXT, LONGEST_TEXT] = [500, 20_000];

let text = DEFAULT_TEXT;
let config: Config = { ...DEFAULT_CONFIG };
let theory: Theory;
let lanes = [new Lane("A", new Set())];
let hidden: Fault | null = null;
let running = false;
let stepsPerDrawing = 1;
let milliseconds = 0;
let redraws: (() => void)[] = [];
const selection: Selection = { block: 0, head: 0, query: 12, key: 11, matrix: "" };

/** Actions and training wait for each other: one runs at a time, in the order of the reader's clicks. */
let work: Promise<void> = Promise.resolve();
function queue(action: () => Promise<void> | void): Promise<void> {
  work = work.then(action).catch((error: unknown) => {
    running = false;
    complain(error instanceof Error ? error.message : String(error));
    render();
  });
  return work;
}

function complain(problem: string): void {
  get("problem").textContent = problem;
  get("problem").hidden = problem === "";
}

/** The first characters of the held-out text, which the attention maps show. */
function probe(): string {
  const start = Math.floor(text.length * 0.9);
  return text.slice(start, start + config.contextLength);
}

/** Draw new models, with the same parameters and batches in all lanes. */
async function create(): Promise<void> {
  complain("");
  theory = theoryOf(config, text);
  for (const lane of lanes) await lane.create(config, text, probe());
  [selection.block, selection.head] = [Math.min(selection.block, config.blocks - 1), Math.min(selection.head, config.heads - 1)];
  begin();
  layOut();
}

function begin(): void {
  running = false;
  [milliseconds, stepsPerDrawing] = [0, 1];
}

async function advance(steps: number): Promise<void> {
  const began = performance.now();
  for (const lane of lanes) await lane.advance(steps, probe());
  const spent = performance.now() - began;
  milliseconds += spent;
  stepsPerDrawing = Math.max(1, Math.min(MOST_STEPS, 2 * steps, Math.round((steps * DRAW_MILLISECONDS) / spent)));
  if (lanes.every((lane) => lane.brokenAt !== null)) running = false;
  render();
}

function train(): void {
  if (!running) return;
  void queue(async () => {
    if (!running) return;
    await advance(stepsPerDrawing);
    await new Promise(requestAnimationFrame);
  }).then(train);
}

/** Build what depends on the number of models, blocks and heads. */
function layOut(): void {
  const several = lanes.length > 1;
  get("switches").replaceChildren(...NAMES.map(makeSwitch));
  redraws = [];
  get("lanes").replaceChildren(...lanes.map((lane, i) => {
    const part = (kind: string) => h("div", { class: kind });
    const [maps, large, steps, table, gradient] = ["maps", "map", "steps", "table", "gradients"].map(part);
    const sample = h("pre", { class: "sample" });
    redraws.push(
      () => { sample.textContent = lane.sample || "Generated text appears after the first steps."; },
      makeMaps(maps, lane, selection, drawLanes),
      makeLargeMap(large, lane, selection, drawLanes),
      makeSteps(steps, lane, selection, () => lane === lanes[0] && hidden !== null),
      makeTable(table, lane, selection, drawLanes),
      makeGradient(gradient, lane, selection),
    );
    return h("div", { class: `model lane-${i}` },
      ...(several ? [h("h3", {}, `Model ${lane.name}`)] : []),
      h("h4", {}, "Generated text"), sample,
      h("h4", {}, "Attention"), maps, large, steps,
      h("h4", {}, "Norms of gradient, weight and update"), table, gradient);
  }));
  get("lanes").classList.toggle("several", several);
  get("second").setAttribute("aria-pressed", String(several));
  get("text-about").textContent =
    `From ${SHORTEST_TEXT} to ${LONGEST_TEXT.toLocaleString("en")} characters. The last tenth is held out. Now: ` +
    `${text.length.toLocaleString("en")} characters, ${lanes[0].lab.vocabulary.length} different ones.`;
  get("inside-about").textContent =
    `Maps of the first ${config.contextLength} held-out characters: a row reads columns, dark is 1. Entropy is a row's mean in nats; ` +
    `uniform attention over what a row sees has ${show(theory.entropyAtStart[0])}. Choose a map, then a cell, for its arithmetic.`;
  render();
}

function makeSwitch(name: Fault): HTMLElement {
  const { does, formula, chapter } = FAULTS[name];
  const id = name.replace(/\W+/g, "-");
  const boxes = lanes.map((lane, i) => {
    const isHidden = lane === lanes[0] && hidden !== null;
    const box = h("input", {
      type: "checkbox", "aria-describedby": id, disabled: isHidden, "data-fault": name, "data-model": lane.name,
      change: () => void queue(() => { lane.flip(name, box.checked, probe()); render(); }),
    });
    box.checked = !isHidden && lane.faults.has(name);
    return h("label", { class: `lane-${i}` }, box, h("span", i ? {} : { class: "fault" }, lanes.length > 1 ? lane.name : name));
  });
  return h("li", {},
    h("div", { class: "boxes" }, ...boxes, ...(lanes.length > 1 ? [h("b", {}, name)] : [])),
    h("p", { id }, does, " ", h("span", { class: "formula" }, formula), " ", chapterLink(chapter)));
}

const drawChart = makeChart(get("chart"));
const drawLanes = () => redraws.forEach((redraw) => redraw());
const checkExercises = makeExercises(get("exercises"), {
  hide: (fault) => queue(() => {
    begin();
    hidden = fault;
    lanes[0].faults.clear();
    lanes[0].faults.add(fault);
    for (const lane of lanes) lane.reset(probe());
    layOut();
    get("bar").scrollIntoView({ block: "nearest" });
  }),
  reveal: () => { hidden = null; layOut(); },
  state: () => ({ lanes, theory, hidden }),
});

function render(): void {
  const step = Math.max(...lanes.map((lane) => lane.step));
  const speed = step ? `, ${show(milliseconds / 1000)} s` : "";
  get("progress").textContent = `step ${step}${speed}`;
  get("train").textContent = running ? "Pause" : "Train";
  drawChart(lanes, theory);
  get("verdicts").replaceChildren(...lanes.map((lane, i) =>
    h("p", { class: `verdict lane-${i}` }, ...(lanes.length > 1 ? [h("b", {}, `${lane.name}: `)] : []), lane.explain(theory).join(" "))));
  drawLanes();
  checkExercises();
}

/** Read the experiment from the address: #blocks=4&heads=2&A=no norm,no mask&B=no norm. */
function readAddress(): void {
  const asked = new URLSearchParams(location.hash.slice(1));
  for (const name of ["blocks", "heads"] as const) {
    const options = [...get<HTMLSelectElement>(name).options].map((option) => option.value);
    const value = asked.get(name);
    if (value !== null && options.includes(value)) config[name] = Number(value);
    get<HTMLSelectElement>(name).value = String(config[name]);
  }
  const faults = (lane: string) => new Set(NAMES.filter((name) => (asked.get(lane) ?? "").split(/,(?! 1)/).includes(name)));
  lanes = ["A", ...(asked.has("B") ? ["B"] : [])].map((name) => new Lane(name, faults(name)));
  hidden = null;
}

get("train").addEventListener("click", () => {
  running = !running;
  get("train").textContent = running ? "Pause" : "Train";
  train();
});
get("step").addEventListener("click", () => void queue(async () => { running = false; await advance(1); }));
get("reset").addEventListener("click", () => void queue(() => {
  begin();
  for (const lane of lanes) lane.reset(probe());
  render();
}));
get("second").addEventListener("click", () => void queue(async () => {
  lanes = lanes.length > 1 ? [lanes[0]] : [lanes[0], new Lane("B", new Set(hidden ? [] : lanes[0].faults))];
  await create();
}));
for (const name of ["blocks", "heads"] as const) {
  get(name).addEventListener("change", () => void queue(() => {
    config[name] = Number(get<HTMLSelectElement>(name).value);
    return create();
  }));
}
get("use").addEventListener("click", () => void queue(async () => {
  const typed = get<HTMLTextAreaElement>("text").value;
  if (typed.length < SHORTEST_TEXT || typed.length > LONGEST_TEXT) {
    const limit = typed.length < SHORTEST_TEXT ? `${SHORTEST_TEXT} are the least; add some` : `${LONGEST_TEXT} are the most; remove some`;
    return complain(`The text has ${typed.length} characters; ${limit}.`);
  }
  const before = text;
  text = typed;
  await create().catch(async (error: unknown) => {
    text = before;
    await create();
    throw error;
  });
  get("bar").scrollIntoView({ block: "nearest" });
}));
addEventListener("hashchange", () => void queue(() => { readAddress(); return create(); }));
addEventListener("resize", () => void queue(render));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => void queue(render));

get("switches-about").textContent =
  "Flip one or several, before training or during it. Each takes one part away, or puts it wrong.";
get<HTMLTextAreaElement>("text").value = text;
readAddress();
void queue(create);
