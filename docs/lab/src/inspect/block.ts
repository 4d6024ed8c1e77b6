import { drawDiagram, type Branch, type Part } from "../diagram";
import { logProbability, type Pass } from "./decoder";
import { format, make, percent } from "./page";
import { largest } from "./tasks";
import type { Panel, View } from "./view";

// The diagram of the layer of the chosen head, with what the model computes at the chosen position.
export function makeBlock(container: HTMLElement, view: View): Panel {
  const { model, quoted } = view;
  const { parameters, config } = model;
  const { n_blocks: L, n_heads: H, n_kv_heads: G, head_dim: K, value_dim: J, d_model: D, vocab_size: V, norm_placement } = config;
  const heading = make("h3", container);
  make("p", container, "The marked way is that of the chosen position. Beside each part: the shape of what it returns, and what your text makes of it.", "name");
  const picture = make("div", container);

  const part = (label: string, shape: string, ...notes: (string | false)[]): Part => ({
    label, shape, notes: notes.filter((text) => text !== false).map((text) => ({ text })),
  });
  const norm = (name: string, stream: string): Part[] => (`${name}.gamma` in parameters ? [part("norm", stream)] : []);

  function attentionParts(pass: Pass, block: number, head: number, t: number): Part[] {
    const T = pass.tokens.length;
    const row = pass.row(block, head, t);
    const [key] = largest(row, 1);
    const entropy = row.reduce((sum, w) => sum - (w > 0 ? w * Math.log(w) : 0), 0);
    const ablated = Array.from({ length: H }, (_, h) => h).filter((h) => view.off.has(`${block}.${h}`));
    const [window, isRotated] = [config.windows[block], config.frequencies[block] !== null];
    return [
      part("Q K V", `${H}×${T}×${K}`, G < H && `${G} of keys and values`),
      part("Q Kᵀ · scale", `${H}×${T}×${T}`, isRotated && "after a rotation (RoPE)"),
      part("mask", `${H}×${T}×${T}`, window < T && `window of ${window}`),
      part("softmax", `${H}×${T}×${T}`, `head ${head}: ${percent(row[key])} to ${quoted(view.tokens[key])}`, `entropy ${format(entropy, 3)} nats`),
      { ...part("A V", `${H}×${T}×${J}`, ablated.length > 0 && `${ablated.length > 1 ? "heads" : "head"} ${ablated.join(", ")}: zeros`), ...(ablated.length ? { broken: "" } : {}) },
      ...(`blocks_${block}.attention.W_O` in parameters ? [part("W_O", `${T}×${D}`)] : []),
    ];
  }

  function mlpParts(T: number, block: number): Part[] {
    const weights = (kind: string, i: number) => parameters[`blocks_${block}.mlp.${kind}_${i}`];
    const parts: Part[] = [];
    for (let i = 1, width = D; weights("W", i); i++) {
      width = weights("W", i).length / width;
      const isLast = !weights("W", i + 1);
      parts.push(part(isLast ? `W_${i}` : `W_${i}, ${config.activation}`, `${T}×${width}`, Boolean(weights("W_gate", i)) && "times a gate"));
    }
    return parts;
  }

  // What follows the last layer: the next token, which is the text's own or the likeliest.
  function output(pass: Pass, T: number, t: number): Part[] {
    const [logits, target, unembedding] = [pass.logits(t), view.tokens[t + 1], config.unembedding];
    const token = target ?? largest(logits, 1)[0];
    const log_p = logProbability(logits, token);
    return [
      ...norm("final_norm", `${T}×${D}`),
      ...(unembedding === "mlp" ? [] : [part(unembedding === "tied" ? "W_Eᵀ" : "W_out", `${T}×${V}`)]),
      part("softmax", `${T}×${V}`, `${quoted(token)} ${percent(Math.exp(log_p))}`, target !== undefined && `loss ${format(-log_p, 3)} nats`),
    ];
  }

  function draw(): void {
    const { position: t, chosen: [block, head] } = view;
    const pass = view.active();
    const T = view.tokens.length;
    if (T === 0 || pass.tokens.length < T) return; // that of the page's text, which ends by drawing it
    const stream = `${T}×${D}`;
    const neighbour = (label: string, i: number) => {
      const x = pass.stream[i].subarray(t * pass.width(i), (t + 1) * pass.width(i));
      return part(label, `${T}×${pass.width(i)}`, `length ${format(Math.hypot(...x), 3)}`);
    };
    const branch = (name: string, parts: Part[], shape = stream): Branch => {
      const own = norm(`blocks_${block}.${name}_norm`, stream);
      const post = norm(`blocks_${block}.${name}_post_norm`, stream);
      const isPost = norm_placement === "post";
      return { parts: [...(isPost ? [] : own), ...parts, ...post], after: isPost ? own : [], shape, cut: config.residual ? undefined : "" };
    };
    heading.textContent = `Layer ${block}, part by part`;
    picture.innerHTML = drawDiagram({
      title: `Layer ${block} of ${L}, from the residual stream before it to that after it, at position ${t}.`,
      path: `position ${t}, ${quoted(view.tokens[t])}`,
      before: [neighbour(block === 0 ? "embed" : `layer ${block - 1}`, block)],
      branches: [branch("attention", attentionParts(pass, block, head, t)), branch("mlp", mlpParts(T, block), `${T}×${pass.width(block + 1)}`)],
      after: block === L - 1 ? output(pass, T, t) : [neighbour(`layer ${block + 1}`, block + 1)],
    });
    picture.style.setProperty("--step", String(view.version)); // dashes move with tokens, and with frames of a film
  }
  return { draw };
}
