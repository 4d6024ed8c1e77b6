"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const make = (tag, parent, text = "", kind = "") => {
  const element = parent.appendChild(document.createElement(tag));
  element.textContent = text;
  if (kind) element.className = kind;
  return element;
};

// Colours that are distinguishable with colour blindness, on white and on black.
const COLOURS = {
  light: ["#2a62c9", "#d1590a", "#16856b", "#b3368b", "#8a6d00", "#6b4fc4", "#b22a2a", "#4f6472"],
  dark: ["#8db4ff", "#ff9c57", "#5fcfae", "#f08cce", "#d9bd4a", "#b7a1ff", "#ff8a80", "#a9bcc9"],
};
const DASHES = ["solid", "dot", "dash", "dashdot"];
const SCALES = {
  light: { sequential: [[0, "#ffffff"], [1, "#17469e"]], diverging: [[0, "#16856b"], [0.5, "#f4f3f0"], [1, "#c04a00"]] },
  dark: { sequential: [[0, "#1e2023"], [1, "#9cc0ff"]], diverging: [[0, "#5fcfae"], [0.5, "#2a2d31"], [1, "#ff9c57"]] },
};

function themed(layout) {
  const axis = (options = {}) => ({
    gridcolor: colour("--line"), linecolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true, ...options,
  });
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("--text"), size: 13 },
    colorway: COLOURS[dark.matches ? "dark" : "light"], margin: { l: 8, r: 8, t: 12, b: 8 }, height: 380,
    legend: { orientation: "h", y: -0.25 }, hoverlabel: { align: "left", namelength: -1 }, ...layout,
    xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
  };
}

function styled(trace) {
  const theme = dark.matches ? "dark" : "light";
  const plot = { ...trace };
  if (plot.colorscale) plot.colorscale = SCALES[theme][plot.colorscale];
  if (plot.type === "heatmap") plot.colorbar = { thickness: 10, outlinewidth: 0, ...plot.colorbar };
  if (plot.line && "colour" in plot.line) {
    const { colour: number, ...line } = plot.line;
    const cycle = Math.floor(number / COLOURS[theme].length);
    plot.line = { dash: DASHES[cycle % DASHES.length], ...line, color: COLOURS[theme][number % COLOURS[theme].length] };
  }
  return plot;
}

const figures = new Map();
function show(element, { traces, layout }) {
  figures.set(element, { traces, layout });
  Plotly.react(element, traces.map(styled), themed(layout), { responsive: true, displayModeBar: false });
}
dark.addEventListener("change", () => figures.forEach((figure, element) => show(element, figure)));

for (const element of document.querySelectorAll(".figure")) show(element, data[element.dataset.of]);

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

// Pixels of a thumbnail, and opacity of the colour behind a token of weight 1.
const [THUMBNAIL_PIXELS, MAX_OPACITY] = [56, 0.5];
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

function attention(container, { texts, notes, layers }) {
  for (const layer of layers) {
    layer.bytes = Uint8Array.from(atob(layer.weights), (letter) => letter.charCodeAt(0));
    [layer.T, layer.S] = [texts[layer.rows].length, texts[layer.columns].length];
  }
  const weight = (layer, head, row, column) => (layer.bytes[(head * layer.T + row) * layer.S + column] / 255) ** 2;
  const thumbnails = make("div", container, "", "layers");
  const strips = {};
  for (const [name, tokens] of Object.entries(texts)) {
    if (Object.keys(texts).length > 1) make("p", container, name, "name");
    const strip = make("div", container, "", "tokens");
    strips[name] = tokens.map((token, at) => {
      const button = make("button", strip, token);
      if (token.endsWith("⏎")) strip.append("\n");
      for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => select(name, at));
      button.addEventListener("click", () => { pinned = pinned === button ? null : button; select(name, at, true); });
      return button;
    });
  }
  const note = make("p", container, "", "note");
  note.setAttribute("aria-live", "polite");
  const map = layers.length ? make("div", container, "", "figure map") : null;
  let [chosen, pinned, current] = [null, null, null];

  function select(name, at, force = false) {
    if (pinned && !force) return;
    current = [name, at];
    for (const strip of Object.values(strips)) for (const token of strip) { token.style.background = ""; token.className = ""; }
    strips[name][at].className = "from";
    const about = [`${name} ${at}: “${texts[name][at]}”`];
    if (notes[name]) about.push(notes[name][at]);
    if (chosen && chosen.layer.rows === name) {
      const { layer, head } = chosen;
      const shares = texts[layer.columns].map((_, column) => weight(layer, head, at, column));
      shares.forEach((share, column) => {
        strips[layer.columns][column].style.background = `rgba(${colour("--look")}, ${Math.sqrt(share) * MAX_OPACITY})`;
      });
      const most = shares.map((share, column) => [share, column]).sort((a, b) => b[0] - a[0]).slice(0, 4);
      const named = most.filter(([share]) => share > 0).map(([share, column]) => `“${texts[layer.columns][column]}” ${percent(share)}`);
      about.push(`head ${head} of ${layer.name} attends to ${named.join(", ")}.`);
    }
    note.textContent = about.filter(Boolean).join(" ");
  }

  function choose(layer, head, button) {
    for (const other of thumbnails.querySelectorAll("button")) other.setAttribute("aria-pressed", other === button);
    chosen = { layer, head };
    const ticks = (tokens) => ({
      tickvals: tokens.map((_, at) => at), tickfont: { size: 9 }, showgrid: false,
      ticktext: tokens.map((token, at) => `${at} ${token.replaceAll("&", "&amp;").replaceAll("<", "&lt;")}`),
    });
    const z = Array.from({ length: layer.T }, (_, row) => Array.from({ length: layer.S }, (_, column) => weight(layer, head, row, column)));
    const axis = layer.T <= 48 && layer.S <= 48 ? ticks : () => ({ showgrid: false });
    show(map, {
      traces: [{ type: "heatmap", z, zmin: 0, zmax: 1, colorscale: "sequential", hovertemplate: "query %{y}, key %{x}: %{z:.3f}<extra></extra>" }],
      layout: {
        height: 460, xaxis: { ...axis(texts[layer.columns]), title: { text: `key (${layer.columns})` } },
        yaxis: { ...axis(texts[layer.rows]), autorange: "reversed", title: { text: `query (${layer.rows})` } },
      },
    });
    if (current && current[0] !== layer.rows) pinned = null;
    select(layer.rows, current && current[0] === layer.rows ? current[1] : layer.T - 1, true);
  }

  function paint(canvas, layer, head) {
    // With more tokens than pixels, a pixel shows the largest of the weights that share it.
    const side = Math.round(THUMBNAIL_PIXELS * devicePixelRatio);
    [canvas.width, canvas.height] = [Math.min(layer.S, side), Math.min(layer.T, side)];
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, canvas.height);
    const ink = colour("--look").split(",").map(Number);
    for (let row = 0; row < layer.T; row++) {
      for (let column = 0; column < layer.S; column++) {
        const [y, x] = [Math.floor((row * canvas.height) / layer.T), Math.floor((column * canvas.width) / layer.S)];
        const at = 4 * (y * canvas.width + x);
        const alpha = Math.max(image.data[at + 3], layer.bytes[(head * layer.T + row) * layer.S + column]);
        image.data.set([...ink, alpha], at);
      }
    }
    context.putImageData(image, 0, 0);
  }

  const painted = [];
  for (const layer of layers) {
    const line = make("div", thumbnails, "", "layer");
    make("span", line, layer.name);
    for (let head = 0; head < layer.heads; head++) {
      const button = make("button", line);
      button.title = `head ${head} of ${layer.name}`;
      button.setAttribute("aria-label", button.title);
      const canvas = make("canvas", button);
      painted.push(() => paint(canvas, layer, head));
      button.addEventListener("click", () => choose(layer, head, button));
    }
  }
  const repaint = () => painted.forEach((again) => again());
  repaint();
  dark.addEventListener("change", () => { repaint(); if (current) select(...current, true); });
  thumbnails.querySelector("button")?.click();
}

for (const element of document.querySelectorAll(".attention")) attention(element, data[element.dataset.of]);
