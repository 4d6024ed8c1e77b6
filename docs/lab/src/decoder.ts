// The forward pass of a decoder, written once over the operations of any arrays. Those of the laboratory are jax-js's,
// which differentiates it; those of the live page are rows of numbers beside a KV cache, or also know the way back.

/** Where the norms of a block stand, and whether its parts add to the residual stream; as in `DecoderConfig`. */
export interface Wiring {
  norm_placement: "pre" | "post" | "both";
  residual: boolean;
}

/** Operations on arrays X, a row per position, with the parameters of one block. They leave their arguments as they are. */
export interface Operations<X> {
  has(parameter: string): boolean;
  norm(x: X, name: string): X;
  /** x W_name, and b_name where there is one; `name` follows the layer's. */
  linear(x: X, layer: string, name: string): X;
  add(x: X, y: X): X;
  /** Activation of h, or h times that of its gate. */
  activate(h: X, gate?: X): X;
  /** Queries, keys and values as attention uses them: with norms and rotations by their positions. */
  place(x: X, kind: "Q" | "K" | "V"): X;
  /** Sums of the values by the attention weights, softmax(q kᵀ · scale), of each head. */
  attend(q: X, k: X, v: X): X;
  /** Sum of the heads' outputs, through W_O where there is one. */
  merge(z: X): X;
}

/** Return the residual stream after a block. */
export function block<X>(ops: Operations<X>, wiring: Wiring, x: X): X {
  return sublayer(ops, wiring, "mlp", sublayer(ops, wiring, "attention", x, attention), mlp);
}

/** Return x + f(norm(x)), or the same with norms elsewhere or without x. */
export function sublayer<X>(
  ops: Operations<X>,
  { norm_placement, residual }: Wiring,
  name: string,
  x: X,
  f: (ops: Operations<X>, x: X) => X,
): X {
  let y = f(ops, norm_placement === "post" ? x : ops.norm(x, `${name}_norm`));
  if (norm_placement === "both") y = ops.norm(y, `${name}_post_norm`);
  if (residual) y = ops.add(x, y);
  return norm_placement === "post" ? ops.norm(y, `${name}_norm`) : y;
}

export function attention<X>(ops: Operations<X>, x: X): X {
  const [q, k, v] = (["Q", "K", "V"] as const).map((kind) => ops.place(ops.linear(x, "attention", kind), kind));
  return ops.merge(ops.attend(q, k, v));
}

export function mlp<X>(ops: Operations<X>, x: X): X {
  for (let i = 1; ; i++) {
    const h = ops.linear(x, "mlp", `${i}`);
    if (!ops.has(`mlp.W_${i + 1}`)) return h;
    x = ops.activate(h, ops.has(`mlp.W_gate_${i}`) ? ops.linear(x, "mlp", `gate_${i}`) : undefined);
  }
}
