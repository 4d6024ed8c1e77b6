import { dark, make, onFrame } from "./page";

/**
 * Show a button with a thumbnail for each head, a row per layer. `paintHead(canvas, layer, head)` draws a thumbnail;
 * `choose(layer, head)` is called where one is pressed, and without arguments where it is released. `describe(layer,
 * head)` returns sentences that are told where one is pointed at.
 */
export function headGrid<Layer extends { name: string; heads: number }>(
  container: Element,
  layers: Layer[],
  { paintHead, choose, canRelease = false, describe = () => [] }: {
    paintHead: (canvas: HTMLCanvasElement, layer: Layer, head: number) => void;
    choose: (layer?: Layer, head?: number) => void;
    canRelease?: boolean;
    describe?: (layer: Layer, head: number) => string[];
  },
): HTMLElement {
  const grid = make("div", container, "", "layers");
  const most = Math.max(...layers.map((layer) => layer.heads));
  grid.style.setProperty("--heads", String(most));
  const painted: (() => void)[] = [];
  make("span", grid, "", "corner");
  for (let head = 0; head < most; head++) make("span", grid, `head ${head}`, "head");
  for (const layer of layers) {
    make("span", grid, layer.name);
    for (let head = 0; head < layer.heads; head++) {
      const button = make("button", grid, "", head === 0 ? "first" : "");
      const name = `head ${head} of ${layer.name}`;
      button.title = [name, ...describe(layer, head)].join(". ");
      button.setAttribute("aria-label", name);
      button.setAttribute("aria-pressed", "false");
      const canvas = make("canvas", button);
      painted.push(() => paintHead(canvas, layer, head));
      button.addEventListener("click", () => {
        const released = canRelease && button.getAttribute("aria-pressed") === "true";
        for (const other of grid.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button && !released));
        if (released) choose();
        else choose(layer, head);
      });
    }
  }
  const repaint = () => painted.forEach((again) => again());
  repaint();
  dark.addEventListener("change", repaint);
  onFrame(repaint);
  return grid;
}
