import type { Theory } from "../engine";
import { clamp, h, onArrows, show, svg } from "./dom";
import type { Lane } from "./lane";

const [LEFT, TOP, BOTTOM] = [34, 16, 24];
/** Largest loss in view, in units of the uniform one. */
const CEILING = 1.6;

/** Draw the losses of all lanes over the lines that theory predicts; return the function that draws them anew. */
export function makeChart(container: HTMLElement) {
  const tip = h("div", { class: "tip", role: "status" });
  const plot = svg("svg", { tabindex: 0, role: "application", "aria-label": "Losses by step; arrow keys read them" });
  const legend = h("div", { class: "legend" });
  container.append(plot, tip, legend);
  let at = -1;
  let shown: { lanes: Lane[]; theory: Theory } | null = null;

  function scales(lanes: Lane[], theory: Theory) {
    const [width, height] = [container.clientWidth, container.clientWidth < 500 ? 240 : 380];
    const last = Math.max(...lanes.map((lane) => lane.step));
    const steps = 200 * 2 ** Math.max(0, Math.ceil(Math.log2(last / 200)));
    const highest = Math.max(
      ...lanes.flatMap((lane) => lane.history.map((p) => Math.max(p.loss, p.heldOut))).filter(Number.isFinite),
      0,
    );
    const most = theory.uniform * clamp((highest * 1.05) / theory.uniform, 1.15, CEILING);
    const x = (step: number) => LEFT + (step / steps) * (width - LEFT - 8);
    const y = (loss: number) => TOP + (1 - loss / most) * (height - TOP - BOTTOM);
    return { width, height, steps, most, highest, x, y };
  }

  function draw(lanes: Lane[], theory: Theory): void {
    shown = { lanes, theory };
    if (!container.clientWidth) return;
    const { width, height, steps, most, highest, x, y } = scales(lanes, theory);
    const narrow = width < 500;
    plot.setAttribute("width", String(width));
    plot.setAttribute("height", String(height));
    const parts: Node[] = [
      svg(
        "clipPath",
        { id: "inside" },
        svg("rect", { x: LEFT, y: TOP, width: width - LEFT, height: height - TOP - BOTTOM }),
      ),
    ];
    const text = (x: number, y: number, value: string, anchor = "start", kind = "") =>
      svg("text", { x, y, "text-anchor": anchor, class: kind }, value);
    for (let loss = 0; loss <= most; loss++) {
      parts.push(svg("g", { class: "gridlines" }, svg("line", { x1: LEFT, x2: width, y1: y(loss), y2: y(loss) })));
      parts.push(text(LEFT - 6, y(loss) + 4, String(loss), "end"));
    }
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      parts.push(
        text(x(part * steps), height - 6, part ? String(part * steps) : "step 0", part === 1 ? "end" : "middle"),
      );
    }
    const meanings = { uniform: "a guess", unigram: "frequencies", bigram: "the last character" };
    let lowest = Infinity; // labels of lines that are close together are above each other
    const levels = (["bigram", "unigram", "uniform"] as const).flatMap((name) => {
      const level = y(theory[name]);
      lowest = Math.min(level - 5, lowest - 14);
      const label = `${name} ${show(theory[name])}${narrow ? "" : `: ${meanings[name]}`}`;
      return [
        text(width - 2, lowest, label, "end", "theory"),
        svg("line", { class: "theory", x1: LEFT, x2: width, y1: level, y2: level }),
      ];
    });
    parts.push(...levels.reverse());
    lanes.forEach((lane, i) => {
      const points = (key: "loss" | "heldOut") =>
        lane.history
          .filter((p) => Number.isFinite(p[key]))
          .map((p) => `${x(p.step)},${y(p[key])}`)
          .join(" ");
      for (const key of ["loss", "heldOut"] as const) {
        parts.push(
          svg("polyline", { class: `line lane-${i} ${key}`, points: points(key), "clip-path": "url(#inside)" }),
        );
      }
      lane.flips.forEach(({ step, text: flipped }, n) => {
        parts.push(svg("line", { class: `flip lane-${i}`, x1: x(step), x2: x(step), y1: TOP, y2: height - BOTTOM }));
        const late = x(step) > width * 0.6;
        parts.push(
          text(
            x(step) + (late ? -4 : 4),
            height - BOTTOM - 6 - 13 * (n % 4),
            flipped,
            late ? "end" : "start",
            `lane-${i}`,
          ),
        );
      });
      if (lane.brokenAt !== null) {
        const end = x(lane.brokenAt);
        parts.push(svg("line", { class: "mark", x1: end, x2: end, y1: TOP, y2: height - BOTTOM }));
        const label = `${lanes.length > 1 ? `${lane.name}: ` : ""}not finite at step ${lane.brokenAt}`;
        parts.push(text(end + 5, TOP + 16 + 16 * i, label, "start", "mark"));
      }
    });
    if (highest > most) parts.push(text(LEFT + 4, TOP - 4, `↑ up to ${show(highest)}`));
    plot.replaceChildren(...parts);
    legend.replaceChildren(
      ...lanes.flatMap((lane, i) =>
        ["loss", "heldOut"].map((key) =>
          h(
            "span",
            {},
            svg(
              "svg",
              { width: 22, height: 10 },
              svg("line", { class: `line lane-${i} ${key}`, x1: 0, x2: 22, y1: 5, y2: 5 }),
            ),
            `${lanes.length > 1 ? `${lane.name}, ` : ""}${key === "loss" ? "training batch" : "held out"}${value(lane, key)}`,
          ),
        ),
      ),
    );
    if (tip.classList.contains("shown")) tell();
  }

  const value = (lane: Lane, key: string) =>
    lane.progress ? ` ${show(key === "loss" ? lane.progress.loss : lane.progress.heldOut)}` : "";

  function tell(): void {
    if (!shown) return;
    const { lanes, theory } = shown;
    const { x, width } = scales(lanes, theory);
    const longest = lanes.reduce((a, b) => (b.history.length > a.history.length ? b : a)).history;
    if (!longest.length) return;
    at = clamp(at, 0, longest.length - 1);
    const { step } = longest[at];
    const lines = lanes.map((lane) => {
      const p = lane.history.find((point) => point.step >= step);
      return p ? `${lanes.length > 1 ? `${lane.name}: ` : ""}batch ${show(p.loss)}, held out ${show(p.heldOut)}` : "";
    });
    tip.textContent = [`step ${step}`, ...lines].join("\n");
    tip.classList.add("shown");
    tip.style.left = `${clamp(x(step) + 10, 0, width - tip.offsetWidth)}px`;
    tip.style.top = `${TOP + 4}px`;
  }

  plot.addEventListener("pointermove", (event) => {
    if (!shown) return;
    const { x } = scales(shown.lanes, shown.theory);
    const longest = shown.lanes.reduce((a, b) => (b.history.length > a.history.length ? b : a)).history;
    const where = event.clientX - plot.getBoundingClientRect().left;
    at = longest.findIndex((p) => x(p.step) >= where);
    if (at < 0) at = longest.length - 1;
    tell();
  });
  onArrows(plot, (columns) => {
    at = clamp(at, 0, 1e9) + columns;
    tell();
  });
  let drawnWidth = 0;
  new ResizeObserver(() => {
    if (container.clientWidth === drawnWidth) return;
    drawnWidth = container.clientWidth;
    requestAnimationFrame(() => shown && draw(shown.lanes, shown.theory));
  }).observe(container);
  for (const event of ["pointerleave", "blur"]) plot.addEventListener(event, () => tip.classList.remove("shown"));
  return draw;
}
