import { drawEach, format, make, type Frame } from "./page";

const moveAll = (detail: Frame) => document.dispatchEvent(new CustomEvent("frame", { detail }));

/** Draw a slider over the frames of a film: `moved` moves all that the page shows of them, by the event "frame". */
export function film(
  container: HTMLElement,
  { steps, losses, prompts = [], texts = [], moved = moveAll }: {
    steps: number[];
    losses?: (number | null)[];
    prompts?: string[];
    texts?: string[][];
    moved?: (frame: Frame) => void;
  },
): void {
  const bar = make("div", container, "", "frames");
  const play = make("button", bar, "Play", "plain");
  const slider = make("input", bar);
  Object.assign(slider, { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1 });
  slider.setAttribute("aria-label", "frame");
  const told = make("output", bar);
  const samples = prompts.map((prompt) => {
    const text = make("pre", document.querySelector(".continued")!);
    make("mark", text, prompt);
    return make("span", text);
  });

  function show() {
    const index = Number(slider.value);
    told.textContent = `step ${format(steps[index])}`;
    if (losses) told.textContent += `, held-out loss ${losses[index]?.toFixed(3) ?? "-"}`;
    slider.setAttribute("aria-valuetext", told.textContent);
    samples.forEach((sample, i) => { sample.textContent = texts[index][i]; });
    moved({ index, position: steps[index] });
  }
  slider.addEventListener("input", show);

  let timer: ReturnType<typeof setInterval> | undefined;
  function stop() {
    clearInterval(timer);
    timer = undefined;
    play.textContent = "Play";
  }
  slider.addEventListener("pointerdown", stop);
  play.addEventListener("click", () => {
    if (timer) return stop();
    if (Number(slider.value) === steps.length - 1) slider.value = "0";
    play.textContent = "Stop";
    show();
    timer = setInterval(() => {
      if (container.ariaBusy === "true") return; // the model of the present frame still reads
      slider.value = String(Number(slider.value) + 1);
      show();
      if (Number(slider.value) === steps.length - 1) stop();
    }, 700);
  });
  show();
}

drawEach("film", film);
