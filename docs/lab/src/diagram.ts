// A picture of one block, as SVG: the laboratory and the live page draw it of their models, and the build for the story.
// The residual stream runs down; branches leave it, and come back to it by a sum. Beside each part stand the shape of
// what it returns and notes: what is measured, and which model has it broken.

/** A line beside a part; `kind` is a class, such as that of a model. */
export interface Note {
  text: string;
  kind?: string;
}

export interface Part {
  label: string;
  /** Of what it returns. */
  shape?: string;
  notes?: Note[];
  /** Class of the model that has it broken. */
  broken?: string;
}

/** A branch and what follows its sum; a class in `cut` means that the stream does not go around it. */
export interface Branch {
  parts: Part[];
  shape?: string;
  notes?: Note[];
  cut?: string;
  after?: Part[];
}

export interface Diagram {
  title: string;
  before: Part[];
  branches: Branch[];
  after: Part[];
  /** Where the gradient goes back to the parameters. */
  back?: Part;
  /** Name of a position, whose way is marked. */
  path?: string;
}

const [WIDTH, BACK, STREAM, BRANCH, TEXT] = [440, 8, 62, 168, 234];
const [BOX, ROW, LINE, TOP, LETTER, PADDING] = [24, 34, 13, 24, 6.6, 5];

const escaped = (text: string) => text.replace(/[&<>]/g, (letter) => `&#${letter.charCodeAt(0)};`);

/** Return the SVG of a diagram; styles are those of diagram.css. */
export function drawDiagram({ title, before, branches, after, back, path }: Diagram): string {
  const shapes: string[] = [];
  const boxes: string[] = [];
  const ways: string[] = []; // of the position that is followed
  let y = TOP;
  const line = (x: number, y: number, text: string, kind = "", anchor = "start", room = Infinity) => {
    const fit = text.length * LETTER > room ? `textLength="${room}" lengthAdjust="spacingAndGlyphs" ` : "";
    return `<text x="${x}" y="${y + 4}" text-anchor="${anchor}" ${fit}class="${kind}">${escaped(text)}</text>`;
  };
  const wire = (d: string, kind = "") => {
    shapes.push(`<path class="wire ${kind}" d="${d}"/>`);
    if (!kind) ways.push(d);
  };

  /** Move down by a row with these lines of text; return its middle. */
  function row({ shape, notes = [] }: { shape?: string; notes?: Note[] }): number {
    const lines = [...(shape ? [{ text: shape, kind: "shape" }] : []), ...notes.filter(({ text }) => text)];
    const height = Math.max(ROW, LINE * lines.length + 8);
    const middle = y + height / 2;
    lines.forEach(({ text, kind }, i) => shapes.push(line(TEXT, middle + (i - (lines.length - 1) / 2) * LINE, text, kind)));
    y += height;
    return middle;
  }

  function box(x: number, part: Part, width: number): number {
    const middle = row(part);
    const kind = part.broken === undefined ? "part" : `part broken ${part.broken}`;
    const rect = `<rect x="${x - width / 2}" y="${middle - BOX / 2}" width="${width}" height="${BOX}" rx="5"/>`;
    boxes.push(`<g class="${kind}">${rect}${line(x, middle, part.label, "", "middle", width - 2 * PADDING)}</g>`);
    return middle;
  }

  const onStream = (part: Part) => box(STREAM, part, 88);
  before.forEach(onStream);
  let since = 0; // where the stream was last drawn to
  for (const branch of branches) {
    const begin = y;
    for (const part of branch.parts) box(BRANCH, part, 104);
    const sum = row({ shape: branch.shape, notes: branch.notes });
    wire(`M${STREAM} ${since}V${begin}`);
    wire(`M${STREAM} ${begin}V${sum}`, branch.cut === undefined ? "" : `cut ${branch.cut}`);
    wire(`M${STREAM} ${begin}H${BRANCH}V${sum}H${STREAM + 9}`);
    boxes.push(`<circle cx="${STREAM}" cy="${sum}" r="9"/>${line(STREAM, sum, "+", "", "middle")}`);
    since = sum;
    branch.after?.forEach(onStream);
  }
  const last = after.map(onStream).at(-1) ?? y;
  wire(`M${STREAM} ${since}V${back ? last : y}`);
  if (back) {
    const middle = onStream(back);
    wire(`M${STREAM} ${last}V${middle}H${BACK}V${TOP + ROW / 2}H${STREAM - 46}`, "back");
  }
  const followed = path === undefined ? "" : `<path class="way" d="${ways.join("")}"/>${line(STREAM + 8, 10, path, "way")}`;
  return (
    `<svg xmlns="http://www.w3.org/2000/svg" class="diagram" role="img" viewBox="0 0 ${WIDTH} ${y + 6}">` +
    `<title>${escaped(title)}</title>${shapes.join("")}${followed}${boxes.join("")}</svg>`
  );
}
