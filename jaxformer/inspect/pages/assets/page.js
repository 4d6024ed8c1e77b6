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
