"use strict";

// The backward pass of a decoder, by hand. As `jax.vjp` does, each function returns what its counterpart in `decoder.js`
// computes, and a function from the gradient of that output to the gradient of the input. Axes are named as there; d
// before a name means the gradient of what is differentiated: here, a log-probability. Parameters get no gradient.

const same = (x) => [x, (dy) => dy];
const plus = (x, y) => x.map((value, i) => value + y[i]);

function dot(x, y) {
  let sum = 0;
  for (let i = 0; i < x.length; i++) sum += x[i] * y[i];
  return sum;
}

// y = x Wᵀ + b, so dx = dy W.
function linearVjp({ matmul }, x, W, b, width) {
  return [matmul.linear(x, W, b, width), (dy) => matmul.transposed(dy, W, width)];
}

// y = γ n + β with n = (x - mean) · scale, so dx = scale (g - mean(g) - n mean(g n)) with g = γ dy; without β, RMSNorm
// subtracts neither mean.
function normalizeVjp(x, gamma, beta, eps) {
  const width = gamma.length;
  const backward = (dy) => {
    const dx = new Float32Array(x.length);
    for (let start = 0; start < x.length; start += width) {
      let mean = 0, meanG = 0;
      if (beta) {
        for (let i = 0; i < width; i++) {
          mean += x[start + i] / width;
          meanG += (gamma[i] * dy[start + i]) / width;
        }
      }
      let square = 0, product = 0;
      for (let i = 0; i < width; i++) {
        square += (x[start + i] - mean) ** 2 / width;
        product += (gamma[i] * dy[start + i] * (x[start + i] - mean)) / width;
      }
      const scale = 1 / Math.sqrt(square + eps);
      for (let i = 0; i < width; i++) {
        dx[start + i] = scale * (gamma[i] * dy[start + i] - meanG - scale * scale * (x[start + i] - mean) * product);
      }
    }
    return dx;
  };
  return [normalize(x, gamma, beta, eps), backward];
}

function normVjp(model, x, name) {
  const { [`${name}.gamma`]: gamma, [`${name}.beta`]: beta } = model.parameters;
  return gamma ? normalizeVjp(x, gamma, beta, model.config.norm_eps) : same(x);
}

const geluSlope = (x) => {
  const [rate, tanh] = [Math.sqrt(2 / Math.PI), Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))];
  return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * rate * (1 + 3 * 0.044715 * x * x);
};
const geluExactSlope = (x) =>
  0.5 * (1 + erf(x * Math.SQRT1_2)) + (x * Math.exp(-0.5 * x * x)) / Math.sqrt(2 * Math.PI);
// Derivatives of `ACTIVATIONS`.
const SLOPES = {
  relu: (x) => Number(x > 0),
  squared_relu: (x) => 2 * Math.max(0, x),
  gelu: geluSlope,
  gelu_exact: geluExactSlope,
  quick_gelu: (x) => sigmoid(1.702 * x) * (1 + 1.702 * x * sigmoid(-1.702 * x)),
  silu: (x) => sigmoid(x) * (1 + x * sigmoid(-x)),
  swiglu: (x) => sigmoid(x) * (1 + x * sigmoid(-x)),
  geglu: geluSlope,
  geglu_exact: geluExactSlope,
  tanh: (x) => 1 - Math.tanh(x) ** 2,
};

// y = act(h), or act(gate) h, layer by layer.
function mlpVjp(model, x, name, width) {
  const p = (part, i) => model.parameters[`${name}.${part}_${i}`];
  const [act, slope] = [ACTIVATIONS, SLOPES].map((table) => table[model.config.activation]);
  const layers = [];
  for (let i = 1; ; i++) {
    const [h, throughH] = linearVjp(model, x, p("W", i), p("b", i), width);
    if (!p("W", i + 1)) return [h, (dy) => layers.reduceRight((dh, layer) => layer(dh), throughH(dy))];
    if (p("W_gate", i)) {
      const [gate, throughGate] = linearVjp(model, x, p("W_gate", i), null, width);
      layers.push((dy) => plus(throughH(dy.map((d, j) => d * act(gate[j]))), throughGate(dy.map((d, j) => d * h[j] * slope(gate[j])))));
      x = h.map((value, j) => act(gate[j]) * value);
    } else {
      layers.push((dy) => throughH(dy.map((d, j) => d * slope(h[j]))));
      x = h.map((value) => act(value));
    }
    width = p("W", i).length / width;
  }
}

// Queries or keys: a projection, its norm, and the rotation, of which the transpose is the rotation backwards.
function projectionVjp(pass, i, name, x, first, n) {
  const { d_model: D, head_dim: K, frequencies, qk_eps } = pass.model.config;
  const p = (part) => pass.model.parameters[`blocks_${i}.attention.${part}_${name}`];
  const [y, throughW] = linearVjp(pass.model, x, p("W"), p("b"), D);
  const [normed, throughNorm] = p("gamma") ? normalizeVjp(y, p("gamma"), null, qk_eps) : same(y);
  if (!frequencies[i]) return [normed, (d) => throughW(throughNorm(d))];
  return [turn(normed.slice(), frequencies[i], K, first, n), (d) => throughW(throughNorm(turn(d.slice(), frequencies[i], K, first, n, -1)))];
}

// Attention of rows x, whose positions begin at `first`. `sums` holds the gradients of the block's keys and values, to
// which the queries add; those of a position are complete after the queries from it on, so the last rows come first.
function attentionVjp(pass, i, x, first, sums) {
  const { model, keys, values } = pass;
  const { d_model: D, n_heads: H, n_kv_heads: G, head_dim: K, value_dim: J, windows, scale } = model.config;
  const [W_O, W_V] = ["W_O", "W_V"].map((name) => model.parameters[`blocks_${i}.attention.${name}`]);
  const y = pass.attention(i, x, first);
  const [q, throughQ] = projectionVjp(pass, i, "Q", x, first, H);
  const [, throughK] = projectionVjp(pass, i, "K", x, first, G);
  const T = x.length / D;

  function backward(dy) {
    const dHeads = W_O ? model.matmul.transposed(dy, W_O, H * J) : H * J === D ? dy : Float32Array.from({ length: T * H * J }, (_, n) => dy[Math.floor(n / (H * J)) * D + (n % J)]);
    sums.heads.set(dHeads, first * H * J);
    const dq = new Float32Array(T * H * K);
    for (let t = 0; t < T; t++) {
      const position = first + t;
      const start = Math.max(0, position - windows[i] + 1);
      for (let h = 0; h < H; h++) {
        if (pass.edits.has(`${i}.${h}`)) continue;
        const [own, group, weights] = [t * H + h, Math.floor(h / (H / G)), pass.row(i, h, position)];
        const dHead = dHeads.subarray(own * J, (own + 1) * J);
        // head = Σ weight · value, and weights are a softmax: dscore = weight (dweight - Σ weight dweight).
        const dWeights = new Float64Array(position + 1);
        let effect = 0; // Σ weight dweight is also the gradient times the head's output
        for (let s = start; s <= position; s++) {
          for (let j = 0, at = (s * G + group) * J; j < J; j++) {
            dWeights[s] += dHead[j] * values[i][at + j];
            sums.values[at + j] += weights[s] * dHead[j];
          }
          effect += weights[s] * dWeights[s];
        }
        sums.effects[h] += effect;
        for (let s = start; s <= position; s++) {
          const dDot = scale * weights[s] * (dWeights[s] - effect);
          for (let k = 0, at = (s * G + group) * K; k < K; k++) {
            dq[own * K + k] += dDot * keys[i][at + k];
            sums.keys[at + k] += dDot * q[own * K + k];
          }
        }
      }
    }
    const rows = (sum, width) => sum.subarray(first * width, (first + T) * width);
    return [throughK(rows(sums.keys, G * K)), model.matmul.transposed(rows(sums.values, G * J), W_V, D)].reduce(plus, throughQ(dq));
  }
  return [y, backward];
}

// x + f(norm(x)), or the same with norms elsewhere or without x; `effect` receives the gradient times f's output.
function sublayerVjp(model, i, part, x, f, effect) {
  const { norm_placement: placement, residual } = model.config;
  const norm = (x, name) => normVjp(model, x, `blocks_${i}.${part}_${name}`);
  const [before, throughBefore] = placement === "post" ? same(x) : norm(x, "norm");
  const [y, throughF] = f(before);
  const [after, throughAfter] = placement === "both" ? norm(y, "post_norm") : same(y);
  const sum = residual ? plus(after, x) : after;
  const [output, throughOutput] = placement === "post" ? norm(sum, "norm") : same(sum);
  const backward = (d) => {
    const dSum = throughOutput(d);
    const dy = throughAfter(dSum);
    effect(dot(dy, y));
    const dx = throughBefore(throughF(dy));
    return residual ? plus(dx, dSum) : dx;
  };
  return [output, backward];
}

// The gradient of a token's log-probability after a row of the residual stream, with respect to the row.
function unembedBackward(model, x, token) {
  const { unembedding, d_model: D, logit_soft_cap: cap } = model.config;
  const [normed, through] = normVjp(model, x, "final_norm");
  const logits = model.unembed(x);
  const d = Float32Array.from(softmax(logits), (p, v) => (v === token) - p);
  if (unembedding === "mlp") return through(d);
  if (cap) logits.forEach((logit, v) => { d[v] *= 1 - (logit / cap) ** 2; });
  return through(model.matmul.transposed(d, model.parameters[unembedding === "tied" ? "embedding.W_E" : "W_out"], D));
}

// Gradients of log p(token) after a position of a pass, which is not changed: of the embedding at each position, (T, D),
// and of the token's own values, (T, G, J); of each block's heads, (T, H, J); and the gradient times the output of each
// head, attention layer and MLP, summed over positions. That is, to first order, what the log-probability would lose if
// the output were zero. Before each few positions, yield how many of how many are computed.
function* backward(pass, position, token) {
  const { model } = pass;
  const { n_blocks: L, d_model: D, n_heads: H, n_kv_heads: G, head_dim: K, value_dim: J } = model.config;
  const T = position + 1;
  const few = 4 * Math.max(1, Math.floor((PRODUCTS_AT_ONCE * L) / model.size / 12)); // three products with each weight
  const [tokenValues, heads] = [new Float32Array(T * G * J), []];
  const effects = Array.from({ length: L }, () => ({ heads: new Float64Array(H), attention: 0, mlp: 0 }));
  let width = pass.width(L);
  let d = new Float32Array(T * width);
  d.set(unembedBackward(model, pass.stream[L].slice(position * width, T * width), token), position * width);
  for (let i = L - 1; i >= 0; i--, width = D) {
    const sums = { keys: new Float32Array(T * G * K), values: new Float32Array(T * G * J), heads: new Float32Array(T * H * J), effects: effects[i].heads };
    const dx = new Float32Array(T * D);
    for (let last = T, first; last > 0; last = first) {
      yield [(L - 1 - i) * T + T - last, L * T];
      first = Math.max(0, last - few);
      const x = pass.stream[i].slice(first * D, last * D);
      const attention = (x) => attentionVjp(pass, i, x, first, sums);
      const mlp = (x) => mlpVjp(model, x, `blocks_${i}.mlp`, D);
      const [middle, throughAttention] = sublayerVjp(model, i, "attention", x, attention, (effect) => { effects[i].attention += effect; });
      const [, throughMlp] = sublayerVjp(model, i, "mlp", middle, mlp, (effect) => { effects[i].mlp += effect; });
      dx.set(throughAttention(throughMlp(d.subarray(first * width, last * width))), first * D);
    }
    d = dx;
    heads[i] = sums.heads;
    sums.values.forEach((value, n) => { tokenValues[n] += value; });
  }
  return { embedding: d, tokenValues, heads, effects };
}
