import { clamp, drawMatrix, h, show } from "./dom";
import type { Lane } from "./lane";
import type { Selection } from "./maps";

const KINDS = ["gradient", "weight", "update"] as const;
/** Powers of ten at which a bar is empty and full. */
const [EMPTY, FULL] = [-7, 3];
const LARGEST_GRADIENTS = 5;
/** Height of the picture of a gradient, unless its cells would be too small. */
const MAX_PIXELS = 240;

/** Norms of every matrix as bars on a logarithmic scale; a click on a name shows its gradient. */
export function makeTable(container: HTMLElement, lane: Lane, selection: Selection, select: () => void) {
  const body = h("tbody");
  const head = h("tr", {}, ...["matrix", ...KINDS].map((name) => h("th", { scope: "col" }, name)));
  container.append(
    h(
      "div",
      { class: "norms", tabindex: 0, role: "region", "aria-label": `Norms of the matrices of ${lane.name}` },
      h("table", {}, h("thead", {}, head), body),
    ),
  );
  let rows: { name: string; button: HTMLElement; cells: HTMLElement[] }[] = [];
  return () => {
    const matrices = lane.sound?.matrices ?? [];
    if (rows.length !== matrices.length) {
      rows = matrices.map(({ name }) => {
        const button = h(
          "button",
          {
            click: () => {
              selection.matrix = selection.matrix === name ? "" : name;
              select();
            },
          },
          ...name.split(/(?<=\.)/).flatMap((part) => [part, h("wbr")]),
        );
        return { name, button, cells: KINDS.map((kind) => h("td", { class: `log ${kind}` })) };
      });
      body.replaceChildren(
        ...rows.map(({ button, cells }) => h("tr", {}, h("th", { scope: "row" }, button), ...cells)),
      );
    }
    rows.forEach(({ name, button, cells }, i) => {
      button.setAttribute("aria-pressed", String(name === selection.matrix));
      KINDS.forEach((kind, j) => {
        const value = matrices[i][kind];
        const share = (Math.log10(value) - EMPTY) / (FULL - EMPTY);
        cells[j].textContent = show(value);
        cells[j].style.setProperty("--share", Number.isFinite(value) ? String(clamp(share, 0, 1)) : "1");
        cells[j].classList.toggle("bad", !Number.isFinite(value));
      });
    });
  };
}

/** The gradient of the selected matrix, as a picture and by its largest entries. */
export function makeGradient(container: HTMLElement, lane: Lane, selection: Selection) {
  return () => {
    const matrix = lane.sound?.matrices.find(({ name }) => name === selection.matrix);
    if (!matrix) return container.replaceChildren();
    const { name, shape } = matrix;
    const columns = shape[shape.length - 1];
    const cell = clamp((MAX_PIXELS * columns) / shape.reduce((a, b) => a * b), 2, 8);
    const [gradient, parameter] = [lane.lab.gradient(name), lane.lab.parameter(name)];
    const order = gradient.map((_, i) => i).sort((a, b) => Math.abs(gradient[b]) - Math.abs(gradient[a]));
    const highest = Math.abs(gradient[order[0]]);
    if (lane.brokenAt !== null) return container.replaceChildren(h("p", {}, `The gradient of ${name} is not finite.`));
    const rows = Array.from({ length: gradient.length / columns }, (_, i) =>
      gradient.slice(i * columns, (i + 1) * columns).map((g) => Math.sqrt(Math.abs(g) / highest)),
    );
    const canvas = h("canvas", { class: "gradient", role: "img", "aria-label": `Gradient of ${name}, entry by entry` });
    drawMatrix(canvas, rows);
    canvas.style.width = `min(100%, ${cell * columns}px)`;
    const list = order
      .slice(0, LARGEST_GRADIENTS)
      .map((i) =>
        h(
          "li",
          {},
          `[${shape.length > 1 ? `${Math.floor(i / columns)}, ` : ""}${i % columns}]: ` +
            `gradient ${show(gradient[i])}, value ${show(parameter[i])}`,
        ),
      );
    container.replaceChildren(
      h("p", { class: "name" }, `${name} ${shape.join(" × ")}: size of each gradient, and the ${list.length} largest`),
      canvas,
      h("ol", { class: "largest" }, ...list),
    );
  };
}
