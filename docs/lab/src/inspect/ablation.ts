import { NOT_EXPLANATION, signed } from "./charts";
import { logProbability, Pass } from "./decoder";
import { make, percent } from "./page";
import { inTasks, isRead, largest } from "./tasks";
import type { View } from "./view";

// Below the tiles of the heads: what ablating the head that is pointed at changes, beside its largest attention weight.

/** Losses of the text without a head, their mean, and the log-probability of the likeliest next token. */
interface Effect {
  losses: Float32Array;
  loss: number;
  end: number;
}

export function makeAblation(container: HTMLElement, view: View) {
  const { model, full, quoted } = view;
  make("p", container, NOT_EXPLANATION, "name");
  const shown = make("p", container, "", "effect");
  shown.setAttribute("aria-live", "polite");
  const effects = new Map<string, Effect>(); // of heads ("block.head") on the text: see `measure`
  let pass: Pass | null = null; // computes without a head
  let [pointed, version, stop]: [string | null, number, () => void] = [null, 0, () => {}];

  const atEnd = (from: Pass) => from.logits(view.tokens.length - 1);
  const likeliest = () => largest(atEnd(full), 1)[0]; // last token, of which the text does not say what follows

  function point(head: string): void {
    if (head === pointed) return;
    pointed = head;
    draw();
  }

  function draw() {
    if (version !== view.version) {
      stop();
      effects.clear();
      version = view.version;
    }
    if (!pointed || !view.tokens.length) shown.textContent = "Point at a head, or move the focus to it, to see what ablating it changes.";
    else if (effects.has(pointed)) tell(pointed, effects.get(pointed)!);
    else if (isRead(view)) measure(pointed);
  }

  function measure(head: string): void {
    stop();
    shown.textContent = "Computing the text without the head …";
    const other = (pass ??= new Pass(model));
    stop = inTasks(other.read(view.tokens, new Map([[head, null]])), {
      done() {
        if (version !== view.version) return; // the text has changed meanwhile
        const losses = other.losses.slice(0, view.tokens.length - 1);
        effects.set(head, { losses, loss: other.loss(), end: logProbability(atEnd(other), likeliest()) });
        draw();
      },
    });
  }

  function tell(ablated: string, { losses, loss, end }: Effect): void {
    const { tokens, position: at } = view;
    const [block, head] = ablated.split(".").map(Number);
    const row = full.row(block, head, at);
    const [key] = largest(row, 1);
    const isLast = at === tokens.length - 1;
    const next = quoted(isLast ? likeliest() : tokens[at + 1]);
    const change = isLast ? end - logProbability(atEnd(full), likeliest()) : full.losses[at] - losses[at];
    const ofText = tokens.length > 1 ? `, and the mean loss of the text by ${signed(loss - full.loss())}` : "";
    shown.textContent = `Head ${head} of layer ${block} at position ${at}: the largest weight is ${percent(row[key])}, on ${quoted(tokens[key])}. Ablating this head alone changes the log-probability of ${next} as the next token by ${signed(change)} nats${ofText}.`;
  }

  return { draw, point };
}
