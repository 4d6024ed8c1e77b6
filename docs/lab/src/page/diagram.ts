// The diagram of a block (`../diagram.ts`) of all models: what is measured in them, and the parts that switches break.
import { drawDiagram, type Note, type Part } from "../diagram";
import type { Config, Fault } from "../engine";
import { show, visible } from "./dom";
import { MODEL_NAMES } from "./experiments";
import type { Lane } from "./lane";
import type { Selection } from "./maps";

const mean = (values: number[]) => values.reduce((a, b) => a + b, 0) / values.length;

/** Return the function that draws the block of all models; `broken` are the switches of each that may be shown. */
export function makeDiagram(container: HTMLElement) {
  return (lanes: Lane[], broken: Fault[][], config: Config, { block, head, query }: Selection): void => {
    const { contextLength: T, width: D, heads: H, hidden: F, blocks } = config;
    const prefix = (i: number) => (lanes.length > 1 ? `${MODEL_NAMES[i]}: ` : "");
    const marks = (faults: Fault[], value?: (lane: Lane) => string): Note[] =>
      lanes.flatMap((lane, i) => {
        const names = faults.filter((fault) => broken[i].includes(fault));
        const texts = [...names, ...(value?.(lane) ? [value(lane)] : [])];
        return texts.map((text) => ({ text: prefix(i) + text, kind: `lane-${i}` }));
      });
    const lit = (faults: Fault[]) => {
      const lane = broken.findIndex((ofLane) => faults.some((fault) => ofLane.includes(fault)));
      return lane < 0 ? undefined : `lane-${lane}`;
    };
    const part = (label: string, shape: string, faults: Fault[] = [], value?: (lane: Lane) => string): Part => ({
      label,
      shape,
      notes: marks(faults, value),
      broken: lit(faults),
    });
    const stream = `${T}×${D}`;
    const adds = { shape: stream, notes: marks(["no residual"]), cut: lit(["no residual"]) };
    const norm = () => part("norm", stream, ["no norm"]);
    const character = ({ look, lab }: Lane, at: number) => `${at} “${visible(lab.vocabulary[look.tokens[at]])}”`;
    const reads = (lane: Lane) => {
      const row = lane.look.pattern[block][head][query];
      const key = row.indexOf(Math.max(...row));
      return key < 0 ? "" : `${character(lane, query)} reads ${character(lane, key)} ${show(row[key])}`; // not a number
    };
    const models = broken.map((faults, i) => `${MODEL_NAMES[i]}: ${faults.join(", ") || "no broken part"}`);
    container.innerHTML = drawDiagram({
      title: `Block ${block} of ${blocks}, from tokens to the loss. ${models.join("; ")}.`,
      path: `position ${query}`,
      before: [part("embed", stream), part("+ position", stream, ["no positions"])],
      branches: [
        {
          ...adds,
          parts: [
            norm(),
            part("Q K V", `3×${H}×${T}×${D / H}`, ["N(0, 1) weights"]),
            part("Q Kᵀ / √K", `${H}×${T}×${T}`, ["unscaled scores"], ({ sound }) =>
              sound ? `variance ${show(mean(sound.scoreVariance[block]))}` : "",
            ),
            part("mask", `${H}×${T}×${T}`, ["no mask", "mask after softmax"]),
            part("softmax", `${H}×${T}×${T}`, ["softmax over queries"], ({ entropy }) => `entropy ${show(mean(entropy[block]))}`),
            part("A V", `${H}×${T}×${D / H}`, [], reads),
            part("W_O", stream),
          ],
        },
        { ...adds, parts: [norm(), part("W_1, ReLU", `${T}×${F}`), part("W_2", stream)] },
      ],
      after: [
        part("W_out", `${T}×${lanes[0].lab.vocabulary.length}`),
        part("loss", "", [], ({ progress }) => (progress ? `${show(progress.heldOut)} held out` : "")),
      ],
      back: part("− η · gradient", "", ["large learning rate"]),
    });
    container.style.setProperty("--step", String(Math.max(...lanes.map((lane) => lane.step)))); // dashes move as it trains
  };
}
