import type { Fault, Theory } from "../engine";
import { get, h, show, write } from "./dom";
import { FAULTS, NAMES } from "./faults";
import { LEAK, ONE_HOT, type Lane } from "./lane";

/** Chapters of the story by their file. */
const CHAPTERS: Record<string, string> = {
  mixing: "1. Rows must mix",
  attention: "2. Weights that read",
  scale: "3. One number",
  residual: "4. Keep what you have",
  depth: "6. Deeper",
  training: "7. Training",
  sharpness: "18. A step too large",
};

/** Whether the page is part of the documentation's site; alone, it has no chapters to link to. */
export const IS_IN_SITE = "site" in document.documentElement.dataset;

export function chapterLink(chapter: string): HTMLElement | string {
  if (!IS_IN_SITE) return CHAPTERS[chapter];
  return h("a", { href: `story/${chapter}.html`, target: "_blank", rel: "noopener" }, CHAPTERS[chapter]);
}

export interface State {
  lanes: Lane[];
  theory: Theory;
  /** The switch that the page has flipped in secret. */
  hidden: Fault | null;
}

/** Whether it is solved, and what is measured now. */
type Check = (state: State) => [boolean, string];

interface Exercise {
  title: string;
  task: string;
  chapter: string;
  check: Check;
}

/** Held-out loss above which a model counts as clearly worse than another, in nats. */
const CLEARLY = 0.4;
const [EARLY, LATE] = [20, 50];

const heldOut = (lane: Lane) => lane.progress?.heldOut ?? Infinity;
const measured = (lane: Lane) => (lane.progress ? `held out ${show(lane.progress.heldOut)}` : "not trained yet");
const differing = (a: Lane, b: Lane) => NAMES.filter((name) => a.faults.has(name) !== b.faults.has(name));
const on = ({ faults }: Lane) => `${faults.size} ${faults.size === 1 ? "switch" : "switches"} on`;

/** Return the check that one of the models passes. */
function oneOf(check: (lane: Lane, state: State) => [boolean, string]): Check {
  return (state) => {
    const results = state.lanes.map((lane): [boolean, string] => {
      const [done, now] = check(lane, state);
      return [done, state.lanes.length > 1 ? `${lane.name}: ${now}` : now];
    });
    return results.find(([done]) => done) ?? [false, results.map(([, now]) => now).join("; ")];
  };
}

export const EXERCISES: Exercise[] = [
  {
    title: "Better than counting",
    task: "With no switch on, bring the held-out loss below the bigram's.",
    chapter: "mixing",
    check: oneOf((lane, { theory }) => [
      lane.faults.size === 0 && heldOut(lane) < theory.bigram,
      `${on(lane)}, ${measured(lane)}, the bigram's is ${show(theory.bigram)}`,
    ]),
  },
  {
    title: "One part less",
    task: "Do it again with exactly one switch on from the start, but not one through which rows read the future.",
    chapter: "mixing",
    check: oneOf((lane, { theory, hidden }) => [
      !hidden && lane.faults.size === 1 && !lane.flips.length && lane.leak < LEAK && heldOut(lane) < theory.bigram,
      `${on(lane)}${lane.flips.length ? ", flipped after the start (press Reset)" : ""}, ${measured(lane)}`,
    ]),
  },
  {
    title: "Cheat",
    task: "Bring the held-out loss below half of the bigram's within 400 steps. Then read its text: why is it nonsense?",
    chapter: "attention",
    check: oneOf((lane, { theory }) => [
      heldOut(lane) < theory.bigram / 2 && lane.step <= 400,
      `step ${lane.step}, ${measured(lane)}, half of the bigram's is ${show(theory.bigram / 2)}`,
    ]),
  },
  {
    title: "One-hot",
    task: `Make a head whose entropy is still below ${ONE_HOT} nats after ${LATE} steps, in a model that is finite.`,
    chapter: "scale",
    check: oneOf((lane) => {
      const least = Math.min(...lane.entropy.flat());
      return [
        lane.brokenAt === null && lane.step >= LATE && least < ONE_HOT,
        `the least entropy is ${show(least)} nats at step ${lane.step}`,
      ];
    }),
  },
  {
    title: "Break it",
    task: `Make the loss not finite before step ${EARLY}.`,
    chapter: "depth",
    check: oneOf(({ brokenAt, step }) => [
      brokenAt !== null && brokenAt < EARLY,
      brokenAt === null ? `finite at step ${step}` : `not finite at step ${brokenAt}`,
    ]),
  },
  {
    title: "One difference",
    task: `Train two models that differ by one switch for 100 steps. B must end ${CLEARLY} nats above A, and be finite.`,
    chapter: "residual",
    check: ({ lanes: [a, b], hidden }) => {
      if (!b) return [false, "needs the second model"];
      const gap = heldOut(b) - heldOut(a);
      const [names, step] = [differing(a, b), Math.min(a.step, b.step)];
      return [
        !hidden && names.length === 1 && step >= 100 && gap >= CLEARLY && b.brokenAt === null,
        `${names.length} different, step ${step}, ` +
          (Number.isFinite(gap) ? `B − A = ${show(gap)} nats` : b.brokenAt === null ? "not trained yet" : "not finite"),
      ];
    },
  },
];

export interface Actions {
  hide(fault: Fault): Promise<void>;
  reveal(): void;
  tell(text: string): void;
  state(): State;
}

/** List the exercises; return the function that checks them. */
export function makeExercises(container: HTMLElement, actions: Actions) {
  const solved = new Set<string>();
  const count = () => write(get("solved"), `${solved.size} of ${EXERCISES.length + 2} solved`);
  const solve = (title: string, status: HTMLElement, text: string) => {
    solved.add(title);
    status.textContent = `Solved: ${text}`;
    status.closest("li")!.classList.add("solved");
    count();
    actions.tell(`Exercise solved: ${title}.`);
  };
  const item = (title: string, task: string, chapter: string, ...rest: Node[]) => {
    const status = h("p", { class: "status" });
    container.append(
      h("li", {}, h("b", {}, title), h("p", {}, task, " Chapter ", chapterLink(chapter)), ...rest, status),
    );
    return status;
  };
  const checked = EXERCISES.map((exercise) => ({
    ...exercise,
    status: item(exercise.title, exercise.task, exercise.chapter),
  }));

  const names = h("select", { "aria-label": "The switch that is on" }, ...NAMES.map((name) => h("option", {}, name)));
  const answer = h(
    "button",
    {
      class: "plain",
      disabled: true,
      click: () => {
        const {
          hidden,
          lanes: [a],
        } = actions.state();
        if (!hidden) return void (verdict.textContent = "No switch is hidden now: flip one in secret again.");
        if (names.value !== hidden) {
          verdict.textContent = `Not ${names.value}. Give model B that switch: equal switches give equal curves.`;
          return;
        }
        solve("Which switch?", verdict, `${hidden}, at step ${a.step}. ${FAULTS[hidden].does}`);
        answer.disabled = true;
        actions.reveal();
      },
    },
    "Answer",
  );
  const hide = h(
    "button",
    {
      class: "plain",
      id: "hide",
      click: async () => {
        await actions.hide(NAMES[Math.floor(Math.random() * NAMES.length)]);
        answer.disabled = false;
        verdict.textContent = "One switch of model A is on. Train, look, and name it.";
      },
    },
    "Flip one in secret",
  );
  const verdict = item(
    "Which switch?",
    "The page flips one switch of model A in secret. Name it from losses, maps and norms; model B can test a guess.",
    "training",
    h("div", { class: "controls", id: "guess" }, hide, names, answer),
  );
  verdict.setAttribute("aria-live", "polite");

  let question: { K: number; products: number[] } | null = null;
  const asked = h("p", {});
  const input = h("input", { type: "number", step: "0.01", min: 0, max: 1, "aria-label": "Weight of position 0" });
  const ask = h(
    "button",
    {
      class: "plain",
      click: () => {
        const { look } = actions.state().lanes[0];
        const [queries, keys] = [look.q[0][0], look.k[0][0]];
        const products = [0, 1].map((s) => queries[1].reduce((sum, q, i) => sum + q * keys[s][i], 0));
        question = { K: queries[1].length, products };
        asked.textContent =
          `Row 1 sees positions 0 and 1. Its products q·k are ${products.map(show).join(" and ")}, and K = ${question.K}. ` +
          "What weight does position 0 get in an intact model? Two decimals suffice.";
      },
    },
    "Ask",
  );
  const check = h(
    "button",
    {
      class: "plain",
      click: () => {
        if (!question) return void (result.textContent = "Press Ask first.");
        const [a, b] = question.products.map((product) => product / Math.sqrt(question!.K));
        const weight = 1 / (1 + Math.exp(b - a));
        if (input.value !== "" && Math.abs(Number(input.value) - weight) <= 0.01) {
          solve("By hand", result, `e^(${show(a)}) / (e^(${show(a)}) + e^(${show(b)})) = ${show(weight)}`);
        } else {
          result.textContent = "Not yet: divide both products by √K, then take the softmax of the two.";
        }
      },
    },
    "Check",
  );
  const result = item(
    "By hand",
    "Compute one attention weight of block 0, head 0 of model A, as it is now.",
    "attention",
    h("div", { class: "controls", id: "by-hand" }, ask, input, check),
    asked,
  );
  result.setAttribute("aria-live", "polite");
  count();

  return () => {
    for (const { title, check, status } of checked) {
      if (solved.has(title)) continue;
      const [done, now] = check(actions.state());
      if (done) solve(title, status, now);
      else write(status, `Now: ${now}.`);
    }
  };
}
