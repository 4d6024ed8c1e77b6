import { clamp, onArrows, colour as rgb } from "../page/dom";
import { colour, dark, drawEach, format, make, onFrame, percent, power, showScroll } from "./page";

/** Return a new SVG element below a parent. */
export function draw<K extends keyof SVGElementTagNameMap>(tag: K, parent: Element, attributes: Record<string, string | number | boolean> = {}, text = ""): SVGElementTagNameMap[K] {
  const element = parent.appendChild(document.createElementNS("http://www.w3.org/2000/svg", tag));
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  if (text) element.textContent = text;
  return element;
}

// Beside attention maps.
export const NOT_EXPLANATION = "Attention weight is not explanation: a head may look hard at a token and change nothing of what the model predicts.";
export const signed = (x: number) => `${x <= -0.0005 ? "−" : "+"}${Math.abs(x).toFixed(3)}`;
export const CHARACTER_PIXELS = 7;
const [TALL, SCALE_STEPS] = [640, 128]; // height of a matrix, in pixels, above which it scrolls; colours of a scale
const COLOURS = 8; // --line-0 to --line-7 of charts.css
const DASHES = ["", "5 3", "1.5 3", "8 3 2 3"];
const MEMORY = 0.9; // of a moving average: that of about ten points

/** Return a box that tells what is pointed at, next to it, and tells it to screen readers. */
export function makeTip(container: HTMLElement) {
  const tip = make("div", container, "", "tip");
  tip.setAttribute("role", "status");
  return {
    show(text: string, x: number, y: number) {
      tip.textContent = text;
      tip.classList.add("shown");
      const [width, height] = [tip.offsetWidth, tip.offsetHeight];
      tip.style.left = `${clamp(x + 12, 0, Math.max(0, container.clientWidth - width))}px`;
      tip.style.top = `${y - height - 10 < 0 ? y + 16 : y - height - 10}px`;
    },
    hide: () => tip.classList.remove("shown"),
  };
}

const hasPlace = (axis: Axis, value: number) => !axis.log || value + axis.offset > 0;

/** Return the scale of an axis: `at(value)` in pixels, and ticks as [value, label]. */
export function makeScale(axis: Axis, values: (number | null)[], from: number, to: number, maxTicks: number) {
  const usable = values.filter((value): value is number => value !== null && Number.isFinite(value) && hasPlace(axis, value));
  let low = usable.reduce((a, b) => Math.min(a, b), axis.from_zero ? 0 : Infinity);
  let high = usable.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!usable.length) [low, high] = axis.log ? [1, 10] : [0, 1];
  if (axis.limits) [low, high] = axis.limits;
  const map = axis.log ? (value: number) => Math.log10(value + axis.offset) : (value: number) => value;
  [low, high] = [map(low), map(high)];
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) [low, high] = axis.from_zero ? [0, high || 1] : [low - 0.5, high + 0.5];
  let ticks = axis.log ? logTicks(low, high, maxTicks) : linearTicks(low, high, maxTicks);
  if (axis.log && axis.offset) ticks = [0, ...logTicks(0, high, maxTicks - 1)].filter((value) => map(value) >= low && map(value) <= high);
  const [start, end] = axis.reverse ? [to, from] : [from, to];
  const at = (value: number) => start + ((clamp(map(value), low, high) - low) / (high - low)) * (end - start);
  const label = (value: number) => (axis.percent ? `${Number((100 * value).toPrecision(3))} %` : format(value));
  return { at, ticks: ticks.map((value): [number, string] => [value, axis.log && Number.isInteger(Math.log10(value)) && (value < 1e-3 || value >= 1e4) ? power(Math.log10(value)) : label(value)]) };
}

export function linearTicks(low: number, high: number, maxTicks: number): number[] {
  const rough = (high - low) / Math.max(1, maxTicks);
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough * 0.999)!;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks.length > 1 || maxTicks > 9 ? ticks : linearTicks(low, high, maxTicks + 1); // one alone is no scale
}

function logTicks(low: number, high: number, maxTicks: number): number[] {
  const within = (values: number[]) => values.filter((value) => Math.log10(value) >= low - 1e-9 && Math.log10(value) <= high + 1e-9);
  const powers = (factors: number[], every: number) => {
    const values: number[] = [];
    for (let p = Math.floor(low); p <= Math.ceil(high); p++) if (p % every === 0) values.push(...factors.map((f) => Number(`${f}e${p}`)));
    return within(values);
  };
  for (const factors of [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 5], [1, 3]]) {
    const ticks = powers(factors, 1);
    if (ticks.length <= maxTicks) return ticks.length > 1 ? ticks : linearTicks(10 ** low, 10 ** high, maxTicks).filter((v) => v > 0);
  }
  for (let every = 1; ; every++) {
    const ticks = powers([1], every);
    if (ticks.length <= maxTicks) return ticks;
  }
}

const CROWD = 5; // lines of one name, from which on their median and middle half are drawn

/** Return the exponential moving average of values, without a bias to zero at its beginning; null stays a gap. */
function smoothed(values: (number | null)[]): (number | null)[] {
  let [sum, weight] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    [sum, weight] = [MEMORY * sum + value, MEMORY * weight + 1];
    return sum / weight;
  });
}

/** An axis, as `charts.py` describes it. */
interface Axis {
  label: string;
  log: boolean;
  offset: number;
  percent: boolean;
  from_zero: boolean;
  reverse: boolean;
  limits: [number, number] | null;
}

interface Line {
  name: string;
  member: string;
  /** Index of its positions. */
  x: number;
  y: (number | null)[];
  points: boolean;
  dotted: boolean;
  noisy: boolean;
}

interface LinesData {
  title: string;
  positions: number[][];
  lines: Line[];
  x: Axis;
  y: Axis;
  height: number;
  marks: [number, string][];
}

/** What charts side by side share whose lines have the same names: a legend. */
const groups = new WeakMap<Element, { names: string; hidden: Set<string>; renders: (() => void)[] }>();

function lines(container: HTMLElement, { title, positions, lines: all, x: xAxis, y: yAxis, height, marks }: LinesData): void {
  const names = [...new Set(all.map((line) => line.name))];
  const place = container.closest(".grid") ?? container;
  const known = groups.get(place);
  const group = known?.names === String(names) ? known : { names: String(names), hidden: new Set<string>(), renders: [] };
  if (!known) groups.set(place, group);
  group.renders.push(render);
  const { hidden } = group;
  let isSmooth = false;
  const look = (name: string) => {
    const number = names.indexOf(name);
    return { stroke: `var(--line-${number % COLOURS})`, "stroke-dasharray": DASHES[Math.floor(number / COLOURS) % DASHES.length] };
  };
  const plot = draw("svg", container, { tabindex: 0, role: "application", "aria-roledescription": "chart", height });
  plot.setAttribute("aria-label", `${title}: ${yAxis.label} over ${xAxis.label}. Arrow keys move along a line and between lines.`);
  const tip = makeTip(container);
  type Point = { x: number; y: number; position: number; value: number };
  let shown: { line: Line; points: Point[]; element: SVGPathElement }[] = [];
  let near: [number, number] | null = null;
  let [marker, cursor]: [SVGCircleElement | null, SVGLineElement | null] = [null, null];
  let along: ((value: number) => number) | null = null;
  let frame: number | null = null;

  function moveCursor() {
    if (frame === null || !cursor || !along) return;
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, String(along(frame)));
    cursor.setAttribute("visibility", "visible");
  }
  onFrame(({ position }) => { frame = position; moveCursor(); });

  function render() {
    const width = container.clientWidth;
    if (!width) return;
    plot.replaceChildren();
    plot.setAttribute("width", String(width));
    const visible = all.filter((line) => !hidden.has(line.name));
    const yValues = visible.flatMap((line) => line.y.filter((_, i) => hasPlace(xAxis, positions[line.x][i])));
    const [top, bottom] = [10, height - 42];
    const y = makeScale(yAxis, yValues, bottom, top, Math.floor(height / 45));
    const left = 26 + CHARACTER_PIXELS * Math.max(3, ...y.ticks.map(([, label]) => label.length));
    const xValues = visible.flatMap((line) => positions[line.x].filter((_, i) => line.y[i] !== null));
    const x = makeScale(xAxis, [...xValues, ...(visible.length ? marks.map(([at]) => at) : [])], left, width - 14, Math.floor(width / 90));
    const grid = draw("g", plot, { class: "gridlines" });
    const labels = draw("g", plot, { class: "labels" });
    for (const [value, label] of y.ticks) {
      draw("line", grid, { x1: left, x2: width - 14, y1: y.at(value), y2: y.at(value) });
      draw("text", labels, { x: left - 8, y: y.at(value) + 4, "text-anchor": "end" }, label);
    }
    for (const [value, label] of x.ticks) {
      draw("line", grid, { x1: x.at(value), x2: x.at(value), y1: top, y2: bottom });
      draw("text", labels, { x: x.at(value), y: bottom + 18, "text-anchor": x.at(value) > width - 30 ? "end" : "middle" }, label);
    }
    draw("text", labels, { x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, xAxis.label);
    draw("text", labels, { transform: `translate(12 ${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, yAxis.label);
    for (const [value, label] of marks) {
      draw("line", plot, { class: "mark", x1: x.at(value), x2: x.at(value), y1: top, y2: bottom });
      const end = x.at(value) > width / 2;
      draw("text", plot, { class: "mark", x: x.at(value) + (end ? -5 : 5), y: top + 12, "text-anchor": end ? "end" : "start" }, label);
    }
    const isCrowd = names.length === 1 && visible.length >= CROWD && visible.every((line) => line.x === visible[0].x);
    if (isCrowd) drawCrowd(visible, x.at, y.at);
    shown = visible.map((line) => {
      const style = line.dotted ? { ...look(line.name), "stroke-dasharray": "2 4" } : look(line.name);
      const trace = (values: (number | null)[], kind: string) => {
        const points: Point[] = [];
        let path = "";
        let pen = "M";
        values.forEach((value, i) => {
          const position = positions[line.x][i];
          if (value === null || !hasPlace(yAxis, value) || !hasPlace(xAxis, position)) { pen = "M"; return; }
          const point = { x: x.at(position), y: y.at(value), position, value };
          const lonely = pen === "M" && (i + 1 === values.length || values[i + 1] === null);
          path += `${pen}${point.x.toFixed(1)} ${point.y.toFixed(1)}${lonely ? "h.01" : ""}`;
          pen = "L";
          points.push(point);
        });
        return { line, points, element: draw("path", plot, { d: path, class: kind, ...style }) };
      };
      const isAverage = isSmooth && line.noisy;
      if (isAverage) trace(line.y, "line raw");
      const traced = trace(isAverage ? smoothed(line.y) : line.y, isCrowd ? "line member" : "line");
      if (line.points && !isAverage) for (const point of traced.points) draw("circle", plot, { cx: point.x, cy: point.y, r: 2.5, fill: style.stroke });
      return traced;
    });
    marker = draw("circle", plot, { class: "marker", r: 5, visibility: "hidden" });
    near = null;
    [cursor, along] = [draw("line", plot, { class: "cursor", visibility: "hidden", y1: top, y2: bottom }), x.at];
    moveCursor();
  }

  /** Draw the median of many lines, and the band of the middle half of them. */
  function drawCrowd(crowd: Line[], across: (value: number) => number, up: (value: number) => number): void {
    const columns = positions[crowd[0].x].map((position, i) => ({
      at: across(position),
      values: crowd.map(({ y }) => y[i]).filter((value) => value !== null && hasPlace(yAxis, value)).map(Number).sort((a, b) => a - b),
    })).filter(({ values }) => values.length);
    const edge = (share: number) =>
      columns.map(({ at, values }) => `${at.toFixed(1)} ${up(values[Math.round(share * (values.length - 1))]).toFixed(1)}`);
    const { stroke } = look(names[0]);
    draw("path", plot, { class: "band", d: `M${[...edge(0.25), ...edge(0.75).reverse()].join("L")}Z`, fill: stroke });
    draw("path", plot, { class: "median", d: `M${edge(0.5).join("L")}`, stroke });
  }

  function tell(row: number, column: number): void {
    const { line, points, element } = shown[row];
    const point = points[column];
    for (const other of shown) other.element.classList.toggle("near", other.element === element);
    marker?.setAttribute("visibility", "visible");
    marker?.setAttribute("cx", String(point.x));
    marker?.setAttribute("cy", String(point.y));
    marker?.setAttribute("fill", look(line.name).stroke);
    const name = [line.name, line.member].filter(Boolean).join(", ");
    const value = yAxis.percent ? percent(point.value) : format(point.value);
    const [box, outer] = [plot.getBoundingClientRect(), container.getBoundingClientRect()];
    tip.show(`${name}\n${xAxis.label} ${format(point.position)}: ${value}`, box.left - outer.left + point.x, box.top - outer.top + point.y);
    near = [row, column];
  }

  function hide() {
    near = null;
    marker?.setAttribute("visibility", "hidden");
    for (const { element } of shown) element.classList.remove("near");
    tip.hide();
  }

  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    let [best, row, column] = [Infinity, -1, -1];
    shown.forEach(({ points }, i) => points.forEach((point, j) => {
      const distance = (point.x - event.clientX + box.left) ** 2 + (point.y - event.clientY + box.top) ** 2;
      if (distance < best) [best, row, column] = [distance, i, j];
    }));
    if (row >= 0) tell(row, column);
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  const first = () => shown.findIndex(({ points }) => points.length);
  plot.addEventListener("focus", () => { if (!near && first() >= 0 && plot.matches(":focus-visible")) tell(first(), shown[first()].points.length - 1); });
  onArrows(plot, (right, down) => {
    if (first() < 0) return;
    let [row, column] = near ?? [first(), 0];
    const { x } = shown[row].points[column];
    if (down) {
      do row = (row + down + shown.length) % shown.length; while (!shown[row].points.length);
      column = shown[row].points.reduce((best, point, i, points) => (Math.abs(point.x - x) < Math.abs(points[best].x - x) ? i : best), 0);
    }
    tell(row, clamp(column + right, 0, shown[row].points.length - 1));
  });

  const isNoisy = all.some((line) => line.noisy && line.y.length > 2);
  const isNamed = names.length > 1 && group !== known;
  const legend = isNamed || isNoisy ? make("div", known || isNoisy ? container : place, "", "legend") : null;
  for (const name of isNamed ? names : []) {
    const entry = make("button", legend!);
    entry.setAttribute("aria-pressed", "true");
    entry.title = "show or hide";
    draw("line", draw("svg", entry, { width: 24, height: 10, "aria-hidden": true }), { x1: 0, x2: 24, y1: 5, y2: 5, ...look(name) });
    make("span", entry, name);
    entry.addEventListener("click", () => {
      if (!hidden.delete(name)) hidden.add(name);
      entry.setAttribute("aria-pressed", String(!hidden.has(name)));
      for (const render of group.renders) render();
    });
  }
  if (isNoisy) {
    const smooth = make("input", make("label", legend!, "smooth"));
    Object.assign(smooth, { type: "checkbox", title: "moving average of single batches" });
    smooth.addEventListener("change", () => { isSmooth = smooth.checked; render(); });
  }
  new ResizeObserver(render).observe(container);
}

type Colour = ArrayLike<number>;

/** Paint a canvas, one pixel a cell, in the colour `[r, g, b, a]` of each. */
export function paint(canvas: HTMLCanvasElement, width: number, height: number, colourAt: (row: number, column: number) => Colour): void {
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d")!;
  const image = context.createImageData(width, height);
  for (let row = 0; row < height; row++) {
    for (let column = 0; column < width; column++) image.data.set(colourAt(row, column), 4 * (row * width + column));
  }
  context.putImageData(image, 0, 0);
}

const mix = (a: number[], b: number[], share: number) => [0, 1, 2].map((i) => a[i] + (b[i] - a[i]) * share).concat(255);

/** Return a function from a value to its colour, `[r, g, b, a]`; no value is transparent. */
function colourScale(largest: number, diverging: boolean): (value: number | null) => Colour {
  const [low, middle, high] = diverging ? [rgb("--minus"), rgb("--middle"), rgb("--plus")] : [null, rgb("--low"), rgb("--high")];
  return (value) => {
    if (value === null) return [0, 0, 0, 0];
    const share = clamp(value / largest, -1, 1);
    return mix(middle, share < 0 && low ? low : high, Math.abs(share));
  };
}

/** From values to colours: the least and the largest value, texts of them, and a function `at` a value. */
interface Scale {
  ends: [number, number];
  tell: (value: number) => string;
  at: (value: number | null) => Colour;
}

export const valueScale = (largest: number, diverging: boolean): Scale => ({
  ends: [diverging ? -largest : 0, largest], tell: (value) => format(value, 3), at: colourScale(largest, diverging),
});
export const ink = () => colour("--look").split(",").map(Number);
/** Return the scale of attention weights, whose opacity is the root of the weight, so that small ones show. */
export function weightScale(): Scale {
  const [r, g, b] = ink();
  return { ends: [0, 1], tell: (weight) => `${100 * weight}\u00a0%`, at: (weight) => [r, g, b, 255 * Math.sqrt(weight ?? 0)] };
}

/** Make a bar that shows a scale, and return a function that draws another. */
export function makeScaleBar(container: Element, name = ""): (scale: Scale) => void {
  const bar = make("div", container, name, "scale");
  const [low, canvas, high] = [make("span", bar), make("canvas", bar), make("span", bar)];
  return ({ ends, tell, at }: Scale) => {
    [low.textContent, high.textContent] = ends.map(tell);
    paint(canvas, SCALE_STEPS, 1, (_, step) => at(ends[0] + ((ends[1] - ends[0]) * step) / (SCALE_STEPS - 1)));
  };
}

/**
 * Draw a matrix of cells: labels, a canvas of colours, a frame around the cell that is pointed at, and its scale.
 * `scale()` returns the scale of what `value(row, column)` returns; `told(row, column)` the text of a cell; `chosen` is
 * called with it, and `picked` on a click or Enter.
 */
export function cells(
  container: HTMLElement,
  { title, rows, columns, cell, value, scale, told, gap = true, columnLabels = true, images = [], chosen, picked }: {
    title: string;
    rows: string[];
    columns: string[];
    cell: [number, number];
    value: (row: number, column: number) => number | null;
    scale: () => Scale;
    told: (row: number, column: number) => string;
    gap?: boolean;
    columnLabels?: boolean;
    images?: string[];
    chosen?: (row: number, column: number) => void;
    picked?: (row: number, column: number) => void;
  },
) {
  const [width, height] = [cell[0] * columns.length, cell[1] * rows.length];
  const wide = make("div", container, "", height > TALL ? "wide tall" : "wide");
  const table = make("div", wide, "", "cells");
  const letters = (texts: string[]) => Math.max(0, ...texts.map((text) => text.length));
  const slanted = columnLabels && CHARACTER_PIXELS * letters(columns) > cell[0] - 6;
  const above = !columnLabels ? 0 : slanted ? 14 + Math.ceil(0.72 * CHARACTER_PIXELS * letters(columns)) : 20;
  const beyond = slanted ? above : 0; // room for the last slanted label
  make("div", table);
  const heads = draw("svg", table, { width: width + beyond, height: above, class: "labels", "aria-hidden": true });
  if (columnLabels) {
    columns.forEach((name, i) => {
      const at = [(i + 0.5) * cell[0], above - 6];
      draw("text", heads, slanted ? { transform: `translate(${at[0]} ${at[1]}) rotate(-45)` } : { x: at[0], y: at[1], "text-anchor": "middle" }, name);
    });
  }
  const names = make("div", table, "", "rows");
  names.setAttribute("aria-hidden", "true");
  rows.forEach((name, i) => {
    const label = make("span", names, name);
    label.style.height = label.style.lineHeight = `${cell[1]}px`;
    if (images[i]) make("img", label).src = images[i];
  });
  const area = make("div", table, "", "area");
  [area.style.width, area.style.height] = [`${width}px`, `${height}px`];
  const canvas = make("canvas", area);
  const overlay = draw("svg", area, { width, height, tabindex: 0, role: "application", "aria-roledescription": "matrix" });
  overlay.setAttribute("aria-label", `${title}: ${rows.length} rows, ${columns.length} columns. Arrow keys move from cell to cell${picked ? ", Enter opens one" : ""}.`);
  if (gap) {
    let path = "";
    for (let i = 1; i < columns.length; i++) path += `M${i * cell[0]} 0V${height}`;
    for (let i = 1; i < rows.length; i++) path += `M0 ${i * cell[1]}H${width}`;
    draw("path", overlay, { class: "gaps", d: path });
  }
  const frame = draw("rect", overlay, { class: "frame", width: cell[0], height: cell[1], visibility: "hidden" });
  const tip = makeTip(container);
  let at: [number, number] | null = null;

  function tell(row: number, column: number, scroll = false): void {
    at = [row, column];
    frame.setAttribute("visibility", "visible");
    frame.setAttribute("x", String(column * cell[0]));
    frame.setAttribute("y", String(row * cell[1]));
    if (scroll) {
      const x = names.offsetWidth + column * cell[0];
      wide.scrollLeft = clamp(wide.scrollLeft, x + cell[0] - wide.clientWidth, x - names.offsetWidth);
      const y = above + row * cell[1];
      wide.scrollTop = clamp(wide.scrollTop, y + cell[1] - wide.clientHeight, y - above);
    }
    const [box, outer] = [area.getBoundingClientRect(), container.getBoundingClientRect()];
    tip.show(told(row, column), box.left - outer.left + (column + 0.5) * cell[0], box.top - outer.top + row * cell[1]);
    chosen?.(row, column);
  }
  function hide() {
    frame.setAttribute("visibility", "hidden");
    tip.hide();
  }
  const within = (event: MouseEvent): [number, number] => {
    const box = overlay.getBoundingClientRect();
    return [clamp(Math.floor((event.clientY - box.top) / cell[1]), 0, rows.length - 1), clamp(Math.floor((event.clientX - box.left) / cell[0]), 0, columns.length - 1)];
  };
  overlay.addEventListener("pointermove", (event) => tell(...within(event)));
  overlay.addEventListener("pointerleave", hide);
  overlay.addEventListener("blur", hide);
  overlay.addEventListener("focus", () => { if (overlay.matches(":focus-visible")) tell(...(at ?? ([0, 0] as const)), true); });
  onArrows(overlay, (right, down) => {
    const [row, column] = at ?? [0, 0];
    tell(clamp(row + down, 0, rows.length - 1), clamp(column + right, 0, columns.length - 1), true);
  });
  if (picked) {
    overlay.classList.add("opens");
    overlay.addEventListener("click", (event) => picked(...within(event)));
    overlay.addEventListener("keydown", (event) => { if (event.key === "Enter" && at) picked(...at); });
  }
  const showScale = makeScaleBar(container);
  const repaint = () => {
    const shown = scale();
    paint(canvas, columns.length, rows.length, (row, column) => shown.at(value(row, column)));
    showScale(shown);
  };
  repaint();
  dark.addEventListener("change", repaint);
  showScroll(wide);
  return { overlay, repaint, remove: () => dark.removeEventListener("change", repaint) };
}

interface HeatmapData {
  title: string;
  values: (number | null)[][];
  rows: string[];
  columns: string[];
  diverging: boolean;
  largest: number;
  texts?: string[][];
  notes?: string[][];
  column_notes: string[];
  cell: [number, number];
  images: string[];
}

function heatmap(container: HTMLElement, data: HeatmapData): void {
  const { title, values, rows, columns, diverging, largest, texts, notes, column_notes: after, cell, images } = data;
  const { overlay } = cells(container, {
    title, rows, columns, cell, images, value: (row, column) => values[row][column], scale: () => valueScale(largest, diverging),
    told: (row, column) => notes?.[row][column] ?? `${rows[row]}, ${columns[column]}: ${format(values[row][column])} ${after[column] ?? ""}`.trim(),
  });
  texts?.forEach((line, row) => line.forEach((text, column) => {
    const strong = Math.abs(values[row][column] ?? 0) > 0.55 * largest;
    const at = { x: (column + 0.5) * cell[0], y: (row + 0.5) * cell[1] + 4, "text-anchor": "middle", class: strong ? "on" : "" };
    if (text) draw("text", overlay, at, text);
  }));
}

/** Draw horizontal bars of `[label, share, is marked]`. */
export function bars(container: Element, rows: [string, number, boolean][], mark = ""): void {
  const list = make("ul", container, "", "bars");
  for (const [label, share, marked] of rows) {
    const row = make("li", list, "", marked ? "marked" : "");
    make("span", row, label, "label");
    make("span", make("span", row, "", "track"), "", "bar").style.width = `${100 * share}%`;
    make("span", row, percent(share), "value");
    if (marked && mark) make("span", row, mark, "mark");
  }
}

drawEach("lines", lines);
drawEach("heatmap", heatmap);
document.querySelectorAll(".wide").forEach(showScroll);
