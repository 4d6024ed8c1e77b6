import { clamp, onArrows } from "../page/dom";

export const dark = matchMedia("(prefers-color-scheme: dark)");
export const colour = (name: string) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Return a new element below a parent. */
export function make<K extends keyof HTMLElementTagNameMap>(tag: K, parent: Element, text = "", kind = ""): HTMLElementTagNameMap[K] {
  const element = parent.appendChild(document.createElement(tag));
  if (text) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

/** Draw each element of a class with the data within it. */
export function drawEach(kind: string, draw: (container: HTMLElement, data: any) => void): void {
  for (const element of document.querySelectorAll<HTMLElement>(`.${kind}`)) {
    draw(element, JSON.parse(element.querySelector("script")!.textContent));
  }
}

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
export const power = (exponent: number) => `10${exponent < 0 ? "⁻" : ""}${[...String(Math.abs(exponent))].map((d) => SUPERSCRIPTS[Number(d)]).join("")}`;

/** Return a number as text of at most four significant digits, integers whole. */
export function format(value: number | null | undefined, digits = 4): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  value ||= 0; // no "-0"
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
    const [mantissa, exponent] = value.toExponential(Math.min(digits, 3) - 1).split("e");
    return `${Number(mantissa)}·${power(Number(exponent))}`;
  }
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 9 });
}
export const percent = (share: number | null) => (share === null || Number.isNaN(share) ? "-" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}\u00a0%`);

/** Frame of a film, and its step. */
export interface Frame {
  index: number;
  position: number;
}

/** Call a function for each frame that the slider of the page's film moves to. */
export const onFrame = (move: (frame: Frame) => void) =>
  document.addEventListener("frame", (event) => move((event as CustomEvent<Frame>).detail));

/** Return the bytes of a text in base64. */
export const bytesOf = (text: string) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

/** Make the buttons below an element one stop of the Tab key, between which arrow keys move. */
export function rove(parent: HTMLElement): void {
  const buttons = () => [...parent.querySelectorAll("button")];
  parent.addEventListener("focusin", ({ target }) => {
    for (const button of buttons()) button.tabIndex = button === target ? 0 : -1;
  });
  onArrows(parent, (columns, rows) => {
    const all = buttons();
    all[clamp(all.indexOf(document.activeElement as HTMLButtonElement) + columns + rows, 0, all.length - 1)].focus();
  });
}

// Tabs, one of which is shown, with the part of the page that the address names. Without scripts, all parts are.
const tabs = [...document.querySelectorAll<HTMLElement>('[role="tab"]')];
const panelOf = (tab: HTMLElement) => document.getElementById(tab.getAttribute("aria-controls")!)!;
function openTab(chosen: HTMLElement): void {
  for (const tab of tabs) {
    tab.setAttribute("aria-selected", String(tab === chosen));
    tab.tabIndex = tab === chosen ? 0 : -1;
    panelOf(tab).hidden = tab !== chosen;
  }
}
function openTarget(): void {
  const target = document.getElementById(location.hash.slice(1));
  openTab(tabs.find((tab) => panelOf(tab).contains(target)) ?? tabs[0]);
  target?.scrollIntoView();
}
if (tabs.length) {
  const list = tabs[0].parentElement!;
  list.hidden = false;
  rove(list);
  for (const tab of tabs) for (const event of ["focus", "click"]) tab.addEventListener(event, () => openTab(tab));
  addEventListener("hashchange", openTarget);
  openTarget();
}

for (const header of document.querySelectorAll("th")) {
  header.firstChild!.addEventListener("click", () => {
    const [row, body] = [header.parentElement as HTMLTableRowElement, header.closest("table")!.tBodies[0]];
    const down = header.getAttribute("aria-sort") !== "descending";
    for (const other of row.cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (line: HTMLTableRowElement) => {
      const cell = line.cells[header.cellIndex];
      const number = Number(cell.dataset.value ?? NaN);
      return "value" in cell.dataset ? (Number.isNaN(number) ? -Infinity : number) : cell.textContent;
    };
    const order = (a: HTMLTableRowElement, b: HTMLTableRowElement) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (down ? -1 : 1);
    body.append(...[...body.rows].sort(order));
  });
}

for (const button of document.querySelectorAll(".unfold")) {
  const more = button.textContent;
  button.addEventListener("click", () => {
    const folded = button.previousElementSibling!.classList.toggle("folded");
    button.setAttribute("aria-expanded", String(!folded));
    button.textContent = folded ? more : "Show fewer rows";
  });
}

// A shadow at each side that has more to scroll to.
const sides = new ResizeObserver((entries) => entries.forEach((entry) => markSides(entry.target)));
function markSides(box: Element): void {
  box.classList.toggle("more-left", box.scrollLeft > 1);
  box.classList.toggle("more-right", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
}
/** Let an element show to which sides it scrolls. */
export function showScroll(box: Element): void {
  box.addEventListener("scroll", () => markSides(box), { passive: true });
  sides.observe(box);
  if (box.firstElementChild) sides.observe(box.firstElementChild);
}
