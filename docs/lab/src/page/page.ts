import { DEFAULT_CONFIG, DEFAULT_TEXT, theory as theoryOf, type Config, type Fault, type Theory } from "../engine";
import { makeChart } from "./chart";
import { makeDiagram } from "./diagram";
import { clamp, get, h, onArrows, oneLine, show, write } from "./dom";
import { chapterLink, IS_IN_SITE, makeExercises } from "./exercises";
import {
  describe,
  fromAddress,
  GUIDED,
  isOwn,
  MODEL_NAMES,
  remember,
  SIZES,
  sizes,
  toAddress,
  type Experiment,
} from "./experiments";
import { FAULTS, NAMES } from "./faults";
import { Lane, nextSample, SAMPLED_STEPS, type Point } from "./lane";
import { makeGradient, makeTable } from "./matrices";
import { makeLargeMap, makeMaps, makeSteps, type Selection } from "./maps";
import { drawPicture, offer, readFile, toFile, type Stored } from "./share";

/** Steps between two drawings: one at first, when most happens, and more later, as measuring costs as much as three. */
const stepsFrom = (step: number) => Math.min(6, 1 + Math.floor(step / 5));
const [SHORTEST_TEXT, LONGEST_TEXT] = [500, 50_000];

let text = DEFAULT_TEXT;
let config: Config = { ...DEFAULT_CONFIG };
let theory: Theory;
let lanes: Lane[] = [];
let hidden: Fault | null = null;
let running = false;
let milliseconds = 0;
let redraws: (() => void)[] = [];
/** Losses of intact models by their sizes and text. */
const intact = new Map<string, Point[]>();
const narrow = matchMedia("(max-width: 40rem)");
const selection: Selection = { block: 0, head: 0, query: 12, key: 11, matrix: "" };

/** Actions and training wait for each other: one runs at a time, in the order of the reader's clicks. */
let work: Promise<void> = Promise.resolve();
function queue(action: () => Promise<void> | void): Promise<void> {
  work = work.then(action).catch((error: unknown) => {
    running = false;
    tellProblem(error);
    render();
  });
  return work;
}

/** Write a sentence below the controls: what has happened, or a problem. */
function tell(text: string, isProblem = false): void {
  const note = get("note");
  note.classList.toggle("problem", isProblem);
  note.hidden = text === "";
  write(note, text);
}

function tellProblem(error: unknown): void {
  tell(error instanceof Error ? error.message : String(error), true);
}

/** The experiment as it is now, but for a hidden switch. */
function experiment(): Experiment {
  const models = lanes.map((lane, i) => (i === 0 && hidden ? [] : [...lane.faults]));
  return { blocks: config.blocks, heads: config.heads, text, models };
}

/** Write the experiment into the address, so that loading the page again keeps it. */
function follow(): void {
  const address = toAddress(experiment());
  remember(text);
  const bare = location.pathname + location.search;
  if (location.hash.slice(1) !== address) history.replaceState(null, "", address ? `#${address}` : bare);
  for (const { address: guided, button } of guides) button.setAttribute("aria-pressed", String(guided === address));
}

const sameModel = () => JSON.stringify([config.blocks, config.heads, text]);

/** The first characters of the held-out text, which the attention maps show. */
function probe(): string {
  const characters = [...text];
  const start = Math.floor(characters.length * 0.9);
  return characters.slice(start, start + config.contextLength).join("");
}

/** Draw new models, with the same parameters and batches in all lanes. */
async function create(): Promise<void> {
  theory = theoryOf(config, text);
  for (const lane of lanes) await lane.create(config, text, probe());
  [selection.block, selection.head] = [
    Math.min(selection.block, config.blocks - 1),
    Math.min(selection.head, config.heads - 1),
  ];
  begin();
  layOut();
}

/** Train these models from now on; others are forgotten. */
function replaceLanes(next: Lane[]): void {
  for (const lane of lanes) if (!next.includes(lane)) lane.lab?.dispose();
  lanes = next;
}

function begin(): void {
  running = false;
  milliseconds = 0;
}

async function advance(steps: number): Promise<void> {
  const began = performance.now();
  for (const lane of lanes) await lane.advance(steps, probe());
  milliseconds += performance.now() - began;
  const end = (history: Point[] = []) => history.at(-1)?.step ?? 0;
  for (const lane of lanes) {
    if (lane.isIntact && end(lane.history) > end(intact.get(sameModel()))) intact.set(sameModel(), [...lane.history]);
  }
  if (lanes.every((lane) => lane.brokenAt !== null)) running = false;
  render();
}

const latestStep = () => Math.max(...lanes.map((lane) => lane.step));

let loops = 0;

/** Train until something else stops it; a loop that a pause has ended, but not yet left, does not go on. */
async function train(): Promise<void> {
  const loop = ++loops;
  const goesOn = () => running && loop === loops;
  while (goesOn()) {
    await queue(async () => {
      if (!goesOn()) return;
      const step = latestStep();
      await advance(Math.min(stepsFrom(step), nextSample(step) - step));
      await new Promise(requestAnimationFrame);
    });
  }
}

/** Build what depends on the number of models, blocks and heads. */
function layOut(): void {
  const several = lanes.length > 1;
  get("switches").replaceChildren(...NAMES.map(makeSwitch));
  redraws = [];
  get("verdicts").replaceChildren(
    ...lanes.map((lane, i) => {
      const number = h("b");
      const of = h("span");
      const sentences = h("p", { "aria-live": "polite" });
      const prompt = h("caption");
      const samples = h("tbody");
      redraws.push(() => {
        const [size, what] = lane.compare(intact.get(sameModel()) ?? []);
        write(number, size);
        write(of, ` ${what}`);
        write(sentences, `${several ? `${lane.name}: ` : ""}${lane.explain(theory).join(" ")}`);
        write(prompt, `It continues “${oneLine(lane.prompt)}” after`);
        const pending = SAMPLED_STEPS.slice(lane.samples.length).map((step) => ({ step, text: "" }));
        const rows = [...lane.samples, ...pending].map(({ step, text }) =>
          h("tr", {}, h("th", { scope: "row" }, `step ${step}`), h("td", {}, oneLine(text))),
        );
        samples.replaceChildren(...rows);
      });
      const name = `Text generated by model ${lane.name}`;
      const ladder = h("table", { class: "samples", "aria-label": name }, prompt, samples);
      return h("div", { class: `verdict lane-${i}` }, h("p", { class: "beside" }, number, of), sentences, ladder);
    }),
  );
  get("lanes").replaceChildren(
    ...lanes.map((lane, i) => {
      const part = (kind: string) => h("div", { class: kind });
      const [maps, large, steps, table, gradient] = ["maps", "map", "steps", "table", "gradients"].map(part);
      const isHidden = () => lane === lanes[0] && hidden !== null;
      const predicted = h("p", { class: "name" });
      redraws.push(
        () =>
          write(
            predicted,
            isHidden()
              ? ""
              : `Entropy predicted before training: ${lane.predicted.map((H, block) => `block ${block} ${show(H)}`).join(", ")} nats.`,
          ),
        makeMaps(maps, lane, selection, drawLanes),
        makeLargeMap(large, lane, selection, drawLanes),
        makeSteps(steps, lane, selection, isHidden),
        makeTable(table, lane, selection, drawLanes),
        makeGradient(gradient, lane, selection),
      );
      return h(
        "div",
        { class: `model lane-${i}`, id: `model-${i}` },
        ...(several ? [h("h3", {}, `Model ${lane.name}`)] : []),
        h("div", {}, h("h3", {}, "Attention"), predicted, maps, large),
        h("div", {}, h("h3", {}, "One cell, step by step"), steps),
        h(
          "div",
          {},
          h("h3", {}, "Norms of each matrix"),
          h("p", { class: "name" }, "At the last step measured. A name shows its gradient."),
          table,
          gradient,
        ),
      );
    }),
  );
  get("lanes").classList.toggle("several", several);
  get("second").setAttribute("aria-pressed", String(several));
  get("tabs").hidden = !several;
  get<HTMLFieldSetElement>("share").disabled = hidden !== null; // nor may it tell the hidden switch
  follow();
  get("text-about").textContent =
    `From ${SHORTEST_TEXT} to ${LONGEST_TEXT.toLocaleString("en")} characters. The last tenth is held out. Now: ` +
    `${[...text].length.toLocaleString("en")} characters, ${lanes[0].lab.vocabulary.length} different ones.`;
  get("inside-about").textContent =
    `Maps of the first ${config.contextLength} held-out characters: a row reads columns, and head 1.0 is the first of ` +
    "the second block. Below each map: the mean entropy of a row in nats, and the variance of its scores. " +
    "Choose a map, then a cell, for its arithmetic.";
  render();
}

function makeSwitch(name: Fault): HTMLElement {
  const { does, formula, chapter, blocks = 2 } = FAULTS[name];
  const id = name.replace(/\W+/g, "-");
  const boxes = lanes.map((lane, i) => {
    const isHidden = lane === lanes[0] && hidden !== null;
    const box = h("input", {
      type: "checkbox",
      "aria-describedby": id,
      disabled: isHidden,
      "data-fault": name,
      "data-model": lane.name,
      change: () =>
        void queue(() => {
          const acts = name !== "N(0, 1) weights" || lane.step === 0;
          lane.flip(name, box.checked, probe());
          follow();
          tell(acts ? "" : `“${name}” acts when parameters are drawn: press Reset.`);
          render();
        }),
    });
    box.checked = !isHidden && lane.faults.has(name);
    return h(
      "label",
      { class: `lane-${i}` },
      box,
      h("span", i ? {} : { class: "fault" }, lanes.length > 1 ? lane.name : name),
    );
  });
  const compare = h(
    "button",
    {
      class: "plain",
      "aria-label": `compare an intact model with ${name}`,
      click: () => {
        const compared = toAddress({ blocks, heads: config.heads, text, models: [[], [name]] });
        void queue(() => open(compared)).then(() => get("train").focus());
      },
    },
    "compare",
  );
  return h(
    "li",
    {},
    h("div", { class: "boxes" }, ...boxes, ...(lanes.length > 1 ? [h("b", {}, name)] : []), compare),
    h(
      "details",
      { class: "fold", open: !narrow.matches },
      h("summary", { "aria-label": `What it does: ${name}` }, "What it does"),
      h("p", { id }, does, " Chapter ", chapterLink(chapter), h("span", { class: "formula" }, formula)),
    ),
  );
}

const drawChart = makeChart(get("chart"));
const drawDiagram = makeDiagram(get("diagram"));
const drawLanes = () => {
  for (const redraw of redraws) redraw();
  drawDiagram(lanes, experiment().models, config, selection);
};
const checkExercises = makeExercises(get("exercises"), {
  hide: (fault) =>
    queue(() => {
      begin();
      hidden = fault;
      lanes[0].faults.clear();
      lanes[0].faults.add(fault);
      for (const lane of lanes) lane.reset(probe());
      layOut();
      get("bar").scrollIntoView({ block: "nearest" });
    }),
  reveal: () => {
    hidden = null;
    layOut();
  },
  tell: (text) => watch() || tell(text), // what to watch stays
  state: () => ({ lanes, theory, hidden }),
});

function render(): void {
  if (!redraws.length) return;
  const step = latestStep();
  get("progress").replaceChildren(`step ${step}`, h("span", {}, step ? `, ${show(milliseconds / 1000)} s` : ""));
  get("train").textContent = running ? "Pause" : "Train";
  drawChart(lanes, theory);
  drawLanes();
  checkExercises();
}

/** Begin the experiment of an address, with the text of the file if a file stored it. */
async function open(address: string, file?: Stored): Promise<void> {
  const { experiment: asked, unknown } = fromAddress(address, file?.text);
  [hidden, text] = [null, asked.text];
  config = { ...DEFAULT_CONFIG, blocks: asked.blocks, heads: asked.heads };
  for (const name of ["blocks", "heads"] as const) get<HTMLSelectElement>(name).value = String(config[name]);
  get<HTMLTextAreaElement>("text").value = text;
  replaceLanes(asked.models.map((faults, i) => new Lane(MODEL_NAMES[i], new Set(faults))));
  showModel(Math.max(0, asked.models.findIndex((faults) => faults.length)));
  await create();
  if (!address && !file) return tell("");
  const from = file ? `From ${file.name}: ` : "";
  const missing = unknown.length ? ` Unknown, and left out: ${unknown.join("; ")}.` : "";
  tell(`${from}${describe(experiment())}. ${watch() || "Press Train."}${missing}`, unknown.length > 0);
}

/** Return what the experiment shows, if it is one of those that the page opens on. */
const watch = () => GUIDED.find(({ address }) => address === toAddress(experiment()))?.watch ?? "";

async function prepare(): Promise<void> {
  await open(location.hash.slice(1));
  for (const fieldset of document.querySelectorAll("fieldset")) fieldset.disabled = false;
  performance.mark("ready");
}

/** Tell why no model can be trained, if so. */
function tellIfBroken(): boolean {
  const isBroken = lanes.every((lane) => lane.brokenAt !== null);
  tell(isBroken ? "Parameters that are not finite cannot be trained: press Reset." : watch());
  return isBroken;
}

function start(): void {
  running = true;
  get("train").textContent = "Pause";
  void train();
}

get("train").addEventListener("click", () => {
  if (!running && !tellIfBroken()) return start();
  running = false;
  get("train").textContent = "Train";
});
get("step").addEventListener(
  "click",
  () =>
    void queue(async () => {
      running = false;
      if (!tellIfBroken()) await advance(1);
    }),
);
get("reset").addEventListener(
  "click",
  () =>
    void queue(() => {
      begin();
      for (const lane of lanes) lane.reset(probe());
      tell(watch());
      render();
    }),
);
get("second").addEventListener(
  "click",
  () =>
    void queue(async () => {
      tell("");
      if (lanes.length > 1) {
        replaceLanes([lanes[0]]);
        return layOut();
      }
      replaceLanes([lanes[0], new Lane("B", new Set(hidden ? [] : lanes[0].faults))]);
      await create();
      tell("Both models begin at step 0, with the same parameters. Flip a switch of one of them, then press Train.");
    }),
);
for (const name of ["blocks", "heads"] as const) {
  get(name).addEventListener(
    "change",
    () =>
      void queue(async () => {
        config[name] = Number(get<HTMLSelectElement>(name).value);
        await create();
        tell(`At step 0 again: ${sizes(config)}.`);
      }),
  );
}
get("use").addEventListener(
  "click",
  () =>
    void queue(async () => {
      const typed = get<HTMLTextAreaElement>("text").value;
      get("bar").scrollIntoView({ block: "nearest" });
      checkText(typed);
      text = typed;
      await create();
      tell("At step 0 again, with your text.");
    }),
);
get("copy").addEventListener("click", async () => {
  const warning = isOwn(text) ? " It leaves out your text, which only a saved experiment holds." : "";
  try {
    await navigator.clipboard.writeText(location.href);
    tell(`Link copied. It opens this experiment at step 0.${warning}`);
  } catch {
    tell(`The browser does not let the page copy; this is the link: ${location.href}${warning}`);
  }
});
get("picture").addEventListener(
  "click",
  () =>
    void queue(async () => {
      const { block, head } = selection;
      const models = lanes.map((lane, i) => ({
        colour: `--lane-${i}`,
        map: lane.look.pattern[block][head],
        lines: [
          `${lane.name}: ${[...lane.faults].join(", ") || "intact"}`,
          lane.compare(intact.get(sameModel()) ?? []).join(" "),
          ...lane.samples.slice(-3).map(({ step, text }) => `Step ${step}: ${oneLine(text)}`),
        ],
      }));
      offer("laboratory.png", await drawPicture(get("chart").querySelector("svg")!, caption(), models));
    }),
);
get("save").addEventListener("click", () => offer("laboratory.json", toFile(toAddress(experiment()), text, lanes)));
get<HTMLInputElement>("load").addEventListener("change", () => {
  const input = get<HTMLInputElement>("load");
  readFile(input.files![0])
    .then((saved) => {
      checkText(saved.text);
      void queue(() => open(saved.address, saved));
    })
    .catch(tellProblem); // the training goes on
  input.value = "";
});

/** Throw an `Error` with one sentence for a text that cannot be used, before anything has changed. */
function checkText(typed: string): void {
  const characters = [...typed];
  const remedy =
    characters.length < SHORTEST_TEXT
      ? `and ${SHORTEST_TEXT} are the least; add some`
      : characters.length > LONGEST_TEXT
        ? `and ${LONGEST_TEXT} are the most; remove some`
        : new Set(characters).size < 2
          ? "all the same; add a second one"
          : "";
  if (remedy) throw new Error(`The text has ${characters.length} characters, ${remedy}.`);
  theoryOf(config, typed); // refuses a text with too many different characters
}

/** Say what a picture shows, and how to see it oneself. */
function caption(): string {
  const drawn = `loss in nats per character, thick on held-out text; attention of head ${selection.block}.${selection.head}`;
  const address = location.protocol.startsWith("http") ? location.href : `lab.html${location.hash}`;
  return `${describe(experiment())}; step ${latestStep()}; ${drawn}. ${address}`;
}

const guides = GUIDED.map(({ title, watch, address }) => {
  const begin = () =>
    void queue(() => open(address)).then(() => {
      get("loss").scrollIntoView({ block: narrow.matches ? "start" : "nearest" });
      start();
    });
  return { address, button: h("button", { class: "plain", click: begin }, h("b", {}, title), watch) };
});
get("guided").append(...guides.map(({ button }) => button));

/** Show one model where there is no room for two: at first the broken one. */
function showModel(index: number): void {
  document.body.dataset.model = String(index);
  tabs.forEach((tab, i) => {
    tab.setAttribute("aria-selected", String(i === index));
    tab.tabIndex = i === index ? 0 : -1;
  });
}
const tabs = MODEL_NAMES.map((name, i) =>
  h("button", { class: "plain", role: "tab", "aria-controls": `model-${i}`, click: () => showModel(i) }, name),
);
get("tabs").append(...tabs);
onArrows(get("tabs"), (columns) => {
  const index = clamp((Number(document.body.dataset.model) || 0) + columns, 0, tabs.length - 1);
  showModel(index);
  tabs[index].focus();
});
showModel(0);

/** Fold explanations where there is little room. */
function fold(): void {
  for (const details of document.querySelectorAll<HTMLDetailsElement>(".fold")) details.open = !narrow.matches;
}
fold();

addEventListener("hashchange", () => void queue(() => open(location.hash.slice(1))));
narrow.addEventListener("change", fold);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => void queue(render));

if (!IS_IN_SITE) get("about").querySelector("a")!.remove();
get("switches-about").textContent =
  "Flip one or several, before training or during it. Each takes one part away, or puts it wrong.";
for (const name of ["blocks", "heads"]) get(name).append(...SIZES.map((size) => h("option", {}, String(size))));
if ("Iterator" in globalThis) requestAnimationFrame(() => setTimeout(() => void queue(prepare))); // the page is painted first
else tell("This browser is too old for the laboratory; use Chrome 122, Firefox 131, Safari 18.4 or a newer one.", true);
