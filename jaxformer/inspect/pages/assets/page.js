"use strict";

const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Return a new element below a parent. */
function make(tag, parent, text = "", kind = "") {
  const element = parent.appendChild(document.createElement(tag));
  if (text) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

/** Draw each element of a class with the data within it. */
function drawEach(kind, draw) {
  for (const element of document.querySelectorAll(`.${kind}`)) {
    draw(element, JSON.parse(element.querySelector("script").textContent));
  }
}

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const power = (exponent) => `10${exponent < 0 ? "⁻" : ""}${[...String(Math.abs(exponent))].map((d) => SUPERSCRIPTS[d]).join("")}`;

/** Return a number as text of at most four significant digits, integers whole. */
function format(value, digits = 4) {
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
const percent = (share) => (share === null || Number.isNaN(share) ? "-" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}\u00a0%`);

const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

/** Call `move(columns, rows)` for arrow keys, Home and End; with Alt, Ctrl or Meta they are the browser's. */
function onArrows(element, move) {
  const moves = {
    ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-Infinity, 0], End: [Infinity, 0],
  };
  element.addEventListener("keydown", (event) => {
    if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    move(...moves[event.key]);
  });
}

/** Make the buttons below an element one stop of the Tab key, between which arrow keys move. */
function rove(parent) {
  const buttons = () => [...parent.querySelectorAll("button")];
  parent.addEventListener("focusin", ({ target }) => {
    for (const button of buttons()) button.tabIndex = button === target ? 0 : -1;
  });
  onArrows(parent, (columns, rows) => {
    const all = buttons();
    all[clamp(all.indexOf(document.activeElement) + columns + rows, 0, all.length - 1)].focus();
  });
}

// Tabs, one of which is shown, with the part of the page that the address names. Without scripts, all parts are.
const tabs = [...document.querySelectorAll('[role="tab"]')];
const panelOf = (tab) => document.getElementById(tab.getAttribute("aria-controls"));
function openTab(chosen) {
  for (const tab of tabs) {
    tab.setAttribute("aria-selected", tab === chosen);
    tab.tabIndex = tab === chosen ? 0 : -1;
    panelOf(tab).hidden = tab !== chosen;
  }
}
function openTarget() {
  const target = document.getElementById(location.hash.slice(1));
  openTab(tabs.find((tab) => panelOf(tab).contains(target)) ?? tabs[0]);
  target?.scrollIntoView();
}
if (tabs.length) {
  tabs[0].parentNode.hidden = false;
  rove(tabs[0].parentNode);
  for (const tab of tabs) for (const event of ["focus", "click"]) tab.addEventListener(event, () => openTab(tab));
  addEventListener("hashchange", openTarget);
  openTarget();
}

for (const header of document.querySelectorAll("th")) {
  header.firstChild.addEventListener("click", () => {
    const [row, body] = [header.parentNode, header.closest("table").tBodies[0]];
    const down = header.getAttribute("aria-sort") !== "descending";
    for (const other of row.cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (line) => {
      const cell = line.cells[header.cellIndex];
      const number = Number(cell.dataset.value ?? NaN);
      return "value" in cell.dataset ? (Number.isNaN(number) ? -Infinity : number) : cell.textContent;
    };
    const order = (a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (down ? -1 : 1);
    body.append(...[...body.rows].sort(order));
  });
}

for (const button of document.querySelectorAll(".unfold")) {
  const more = button.textContent;
  button.addEventListener("click", () => {
    const folded = button.previousElementSibling.classList.toggle("folded");
    button.setAttribute("aria-expanded", !folded);
    button.textContent = folded ? more : "Show fewer rows";
  });
}

// A shadow at each side that has more to scroll to.
const sides = new ResizeObserver((entries) => entries.forEach((entry) => markSides(entry.target)));
function markSides(box) {
  box.classList.toggle("more-left", box.scrollLeft > 1);
  box.classList.toggle("more-right", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
}
/** Let an element show to which sides it scrolls. */
function showScroll(box) {
  box.addEventListener("scroll", () => markSides(box), { passive: true });
  sides.observe(box);
  if (box.firstElementChild) sides.observe(box.firstElementChild);
}
