// The diagram of a block as a picture of the story, which moves by itself.
import { drawDiagram, type Part } from "./diagram";
import style from "./diagram.css";

const COLOURS = `
svg { --text: #595959; --soft: #6b6b6b; --card: #fff; --accent: #2a62c9; }
@media (prefers-color-scheme: dark) { svg { --text: #b8b8b8; --soft: #a0a0a0; --card: #20232d; --accent: #8db4ff; } }
@media (prefers-reduced-motion: no-preference) { .way { animation: flow 1s linear infinite; } }
@keyframes flow { to { stroke-dashoffset: -16px; } }
`;

const part = (label: string, shape: string, text = ""): Part => ({ label, shape, notes: [{ text }] });
const stream = "T×D";

/** A pre-norm block: a stream that two sublayers read and add to. */
export const block = drawDiagram({
  title: "A block: attention and MLP each read the normed stream and add to it.",
  path: "position t",
  before: [],
  branches: [
    {
      parts: [
        part("RMSNorm", stream),
        part("Q K V", "H×T×K"),
        part("Q Kᵀ / √K", "H×T×T", "how well t and s match"),
        part("mask", "H×T×T", "no row reads later ones"),
        part("softmax", "H×T×T", "weights that sum to 1"),
        part("A V", "H×T×K", "moves between rows"),
        part("W_O", stream),
      ],
      shape: stream,
      notes: [{ text: "the residual stream" }],
    },
    { parts: [part("RMSNorm", stream), part("W_1, ReLU", "T×F", "within each row"), part("W_2", stream)], shape: stream },
  ],
  after: [part("next block", "")],
}).replace(/(?<=<\/title>)/, `<style>${style}${COLOURS}</style>`).replace("<svg ", '<svg width="440" ');
