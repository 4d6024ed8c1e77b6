// A picture of one block: what flows through it, the shapes on the wires, and the parts that switches break.
import type { Config, Fault } from "../engine";
import { show, svg } from "./dom";
import { MODEL_NAMES } from "./experiments";
import type { Lane } from "./lane";

const [WIDTH, HEIGHT] = [960, 240];
/** Heights of the stream, of the branches and of the gradient that flows back. */
const [STREAM, BRANCH, BACK] = [34, 104, 222];
const [BOX, LINE] = [30, 14];

interface Part {
  x: number;
  width: number;
  y: number;
  label: string;
  faults: Fault[];
  /** What is measured there, of one model. */
  value?: (lane: Lane, block: number) => string;
}

const mean = (values: number[]) => values.reduce((a, b) => a + b, 0) / values.length;

const PARTS: Part[] = [
  { x: 66, width: 66, y: STREAM, label: "embed", faults: [] },
  { x: 146, width: 66, y: STREAM, label: "+ position", faults: ["no positions"] },
  { x: 236, width: 50, y: BRANCH, label: "norm", faults: ["no norm"] },
  { x: 322, width: 58, y: BRANCH, label: "Q K V", faults: ["N(0, 1) weights"] },
  {
    x: 416,
    width: 66,
    y: BRANCH,
    label: "Q Kᵀ / √K",
    faults: ["unscaled scores"],
    value: ({ sound }, block) => (sound ? `variance ${show(mean(sound.scoreVariance[block]))}` : ""),
  },
  { x: 500, width: 50, y: BRANCH, label: "mask", faults: ["no mask", "mask after softmax"] },
  {
    x: 576,
    width: 60,
    y: BRANCH,
    label: "softmax",
    faults: ["softmax over queries"],
    value: ({ entropy }, block) => `entropy ${show(mean(entropy[block]))}`,
  },
  { x: 654, width: 58, y: BRANCH, label: "A V W_O", faults: [] },
  { x: 736, width: 50, y: BRANCH, label: "norm", faults: ["no norm"] },
  { x: 794, width: 46, y: BRANCH, label: "MLP", faults: [] },
  { x: 874, width: 50, y: STREAM, label: "W_out", faults: [] },
  {
    x: 930,
    width: 46,
    y: STREAM,
    label: "loss",
    faults: [],
    value: ({ progress }) => (progress ? show(progress.heldOut) : ""),
  },
  { x: 480, width: 110, y: BACK, label: "− η · gradient", faults: ["large learning rate"] },
];

/** Where the branches leave the stream and come back to it. */
const BRANCHES: [number, number][] = [
  [198, 696],
  [704, 830],
];

/** Draw the block of all models; return the function that draws it anew. */
export function makeDiagram(plot: SVGSVGElement) {
  plot.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  let drawn = "";
  let values: ((lanes: Lane[]) => void)[] = [];

  function build(broken: Fault[][], { contextLength: T, width: D, heads: H, blocks }: Config, block: number) {
    values = [];
    const wire = (d: string, kind = "") => svg("path", { class: `wire ${kind}`, d });
    const shape = (x: number, y: number, text: string) => svg("text", { x, y, class: "shape" }, text);
    const prefix = (i: number) => (broken.length > 1 ? `${MODEL_NAMES[i]}: ` : "");
    const isBroken = (faults: Fault[]) => broken.findIndex((ofLane) => faults.some((fault) => ofLane.includes(fault)));
    /** Name the switches of each model that break a part, and below them what is measured there. */
    const marks = (x: number, y: number, faults: Fault[], value?: Part["value"]) => {
      const names = broken.flatMap((ofLane, i) =>
        faults.filter((fault) => ofLane.includes(fault)).map((fault): [string, number] => [prefix(i) + fault, i]),
      );
      const measured = value ? broken.map((_, i): [string, number] => ["", i]) : [];
      return [...names, ...measured].map(([text, i], row) => {
        const mark = svg("text", { x, y: y + LINE * row, class: `lane-${i}` }, text);
        if (value && !text) {
          values.push((lanes) => {
            const measured = value(lanes[i], block);
            mark.textContent = measured && prefix(i) + measured;
          });
        }
        return mark;
      });
    };
    const cut = isBroken(["no residual"]);
    plot.replaceChildren(
      wire(`M10 ${STREAM}H${WIDTH - 30}`),
      ...BRANCHES.flatMap(([from, to]) => [
        wire(`M${from} ${STREAM}V${BRANCH}H${to}V${STREAM + 8}`),
        ...(cut < 0 ? [] : [svg("path", { class: "cut", d: `M${from + 8} ${STREAM}H${to - 8}` })]),
        svg("circle", { cx: to, cy: STREAM, r: 8 }),
        svg("text", { x: to, y: STREAM + 4 }, "+"),
      ]),
      wire(`M${WIDTH - 30} ${STREAM + BOX / 2}V${BACK}H33V${STREAM + 6}`, "back"),
      shape(20, STREAM - 8, String(T)),
      shape(450, STREAM - 8, `residual stream ${T}×${D}`),
      ...marks(450, STREAM + 18, ["no residual"]),
      shape(367, BRANCH - 20, `${H}×${T}×${D / H}`),
      shape(538, BRANCH - 20, `${H}×${T}×${T}`),
      shape(765, STREAM - 8, blocks > 1 ? `block ${block} of 0 to ${blocks - 1}` : ""),
      ...PARTS.flatMap(({ x, width, y, label, faults, value }) => {
        const lane = isBroken(faults);
        const below = y + BOX / 2 + LINE + (y === BRANCH && value ? 2 * LINE : 0); // the names at its neighbours
        return [
          svg(
            "g",
            { class: lane < 0 ? "part" : `part broken lane-${lane}` },
            svg("rect", { x: x - width / 2, y: y - BOX / 2, width, height: BOX, rx: 5 }),
            svg("text", { x, y: y + 4 }, label),
          ),
          ...(y === BACK ? marks(x + 130, y - 6, faults) : marks(x, below, faults, value)),
        ];
      }),
    );
    const all = broken.map((faults, i) => `${MODEL_NAMES[i]}: ${faults.join(", ") || "no broken part"}`);
    plot.setAttribute("aria-label", `One block, from tokens to the loss. ${all.join("; ")}.`);
  }

  /** `broken` are the switches of each model that may be shown. */
  return (lanes: Lane[], broken: Fault[][], config: Config, block: number): void => {
    const key = JSON.stringify([broken, config, block]);
    if (key !== drawn) build(broken, config, block);
    drawn = key;
    for (const show of values) show(lanes);
    plot.style.setProperty("--step", String(Math.max(...lanes.map((lane) => lane.step)))); // dashes move as it trains
  };
}
