"""A decoder in the page: its logits, tokens, cache and head switches against the model's own, in one browser."""

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxformer.data.tokenizer import END_OF_TEXT, Tokenizer
from jaxformer.inspect import capture, capture_gradients, intervene, patch_activations
from jaxformer.inspect.pages import live
from jaxformer.inspect.pages.labels import token_label
from jaxformer.inspect.pages.live import KNOWN_SPLITS, LiveSection, live_section, pack_tokenizer
from jaxformer.inspect.pages.page import render_page, write_page
from jaxformer.inspect.pages.weights import GROUP, flatten, pack_names, pack_params, round_params
from jaxformer.models.decoder import BlockAttention, DecoderConfig, ExpertsConfig
from jaxformer.models.objective import Params
from jaxformer.nn.mlp import ACTIVATIONS
from jaxformer.ops import RoPE
from jaxformer.ops.positions import Llama3Scaling
from tests.arrays import assert_close, build, plain_decoder, plain_rung, rung_like
from tests.browser import browsing, complaints, embedded, wait_for
from tests.helpers import slow

VOCAB, CONTEXT, TOLERANCE = 600, 24, 1e-4
FILE_BYTES = 10_000
"""Size of the files beside a page."""
QUICK = plain_decoder(
    vocab_size=VOCAB, context_length=CONTEXT, d_model=16, n_blocks=2, n_heads=2, qk_norm=True,
    d_ff=(31,), norm="rmsnorm", final_norm=True, positions="none", rope=RoPE(),
)  # fmt: skip
LOCAL = BlockAttention(5, RoPE(50.0))
CONFIGS = {
    "quick": QUICK,
    "llama": replace(
        QUICK, d_model=24, n_heads=6, n_kv_heads=2, head_dim=8, activation="swiglu", bias=False, qk_norm=False,
        unembedding="tied", rope=RoPE(100.0, Llama3Scaling(8.0, 1.0, 4.0, 12)),
    ),
    "gemma": rung_like(
        QUICK, n_blocks=3, n_kv_heads=1, activation="geglu", bias=False, norm_placement="both", norm_eps=1e-3,
        rope=RoPE(scaling=2.0), attention=(LOCAL, BlockAttention(), LOCAL), embedding_scale=4.0, logit_soft_cap=3.0,
        score_scale=0.3, value_dim=11, value_embedding=True,
    ),
    "post": replace(
        QUICK, attention_bias=True, d_ff=(32, 24), activation="gelu", norm="layernorm", norm_placement="post",
        qk_norm=False, positions="learned", rope=None, max_context=30,
    ),
    "rung": plain_rung(
        vocab_size=VOCAB, context_length=CONTEXT, d_model=16, n_heads=3, head_dim=12, value_dim=16, scaled=False,
        residual=False, mlp_logits=True, d_ff=(32,), positions="sinusoidal",
    ),
}  # fmt: skip
CORPUS = [
    "The state of the Union is strong.\n", "We don't know  what they've seen; 1,234 of 5,678 did.\n",
    "café, naïve, 日本語 and 🙂 in one line\n",
]  # fmt: skip
TEXTS = [
    "", "a", " The  Union\n\n is   strong. ", "\t\tI'm you'LL '\u017f don't", "cafe\u0301 café",
    "👩\u200d👧 🇩🇪🙂 日本語", "\ufeff x\u0085y\u00a0z\u2028", "<|endoftext|> </s>",
    "12,345.67 ½²!!\r\n", "\x00\x7f\ufffd\U0010ffff", "▁▁a ▁b", "hehehe", "of", "a~b", "the sta" * 20,
]  # fmt: skip


def byte_level(pattern: str, **model: Any) -> Tokenizer:
    """Return a tokenizer of published byte-level models, which split a text by a pattern, with the merges of ours."""
    form = json.loads(Tokenizer.train(CORPUS, 330).as_json())
    inner = tokenizers.Tokenizer.from_str(json.dumps(form | {"model": form["model"] | model}))
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    levels = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.normalizer, inner.pre_tokenizer = normalizers.NFC(), pre_tokenizers.Sequence([split, levels])
    return Tokenizer(inner)


def character_level(normalizer: Any, pre_tokenizer: Any, **model: Any) -> Tokenizer:
    """Return a tokenizer as SentencePiece's: merges of characters, others as bytes. A later merge makes pairs of an
    earlier one, and one token has no merges."""
    words = [*"▁Thestaoné", "▁t", "he", "▁the", "st", "sta", "▁▁", "heh", "▁of"]
    merges = [("he", "h"), ("▁", "t"), ("h", "e"), ("▁t", "he"), ("s", "t"), ("st", "a"), ("▁", "▁")]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True} | model
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges, **model))
    inner.normalizer, inner.pre_tokenizer = normalizer, pre_tokenizer
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(inner)


def without_controls(tokenizer: Tokenizer) -> Tokenizer:
    """Return a byte-level tokenizer without tokens for some bytes, as published ones are."""
    form = json.loads(tokenizer.as_json())
    form["model"]["vocab"] = {k: v for k, v in form["model"]["vocab"].items() if k not in "ĄĆÀÁ"}  # 04 06 C0 C1
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(form)))


PREPENDED = normalizers.Sequence([
    normalizers.Replace("~", "$&"), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
])  # fmt: skip
TOKENIZERS = {
    "quick": lambda: Tokenizer.train(CORPUS, 400),
    "llama": lambda: byte_level(KNOWN_SPLITS[1], ignore_merges=True),
    "gemma": lambda: character_level(PREPENDED, None),
    "post": lambda: character_level(None, pre_tokenizers.Metaspace("▁", "first", True), ignore_merges=True),
    "rung": lambda: without_controls(byte_level(KNOWN_SPLITS[2])),
}
LOGITS = """
    const data = JSON.parse(document.querySelectorAll(".live > script")[arguments[0]].textContent);
    const [model, tokens, off] = [new Model(data), arguments[1], new Map([[arguments[2], null]])];
    const rows = (pass) => tokens.map((_, t) => Array.from(pass.logits(t)));
    const [full, cached, ablated, parted] = [1, 2, 3, 4].map(() => new Pass(model));
    const read = (pass, ...given) => {
      for (const job = pass.read(...given); ; ) {
        const { done, value } = job.next();
        if (done) return value;
      }
    };
    read(full, tokens);
    const computed = tokens.map((_, t) => read(cached, tokens.slice(0, t + 1)));
    read(ablated, tokens.slice(0, 9));
    read(ablated, tokens, off);
    model.size = 1e9; // four positions at a time
    read(parted, tokens.with(9, 0));
    const job = parted.read(tokens, off);
    const parts = Array.from({ length: 3 }, () => job.next().value[0]); // and no more
    read(parted, tokens.slice(0, 15));
    read(parted, tokens);
    const maps = Array.from({ length: data.config.n_heads }, (_, h) => Array.from(full.row(0, h, tokens.length - 1)));
    const result = [rows(full), rows(cached), rows(ablated), maps, [full.loss(), ablated.loss()]];
    const inParts = [rows(parted), parted.loss(), parts];
    read(full, tokens.with(3, 0), off); // another token and another head at once, and back
    read(full, tokens);
    return [...result, rows(full), computed, inParts];
"""
DECODED = """
    const other = JSON.parse(document.querySelector(".live > script").textContent);
    const { matmul, parameters } = new Model({ ...other, ...arguments[0] });
    return [Array.from(matmul.weights), Object.keys(parameters)];
"""
DROP = """
    const transfer = new DataTransfer();
    arguments[0].forEach((bytes, i, { length }) => {
      transfer.items.add(new File([Uint8Array.from(bytes)], `renamed.${length - 1 - i}`)); // in any order
    });
    const drop = () => document.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true }));
    drop();
    drop();
"""
TOKENS = """
    const data = JSON.parse(document.querySelectorAll(".live > script")[arguments[0]].textContent);
    const tokenizer = new Tokenizer(data.tokenizer);
    const labels = tokenizer.tokenBytes.map((_, token) => tokenizer.label(token));
    return [labels, arguments[1].map((text) => [tokenizer.encode(text), tokenizer.decode(tokenizer.encode(text))])];
"""
LOOKUPS = """
    const data = JSON.parse(document.querySelectorAll(".live > script")[arguments[0]].textContent);
    const tokenizer = new Tokenizer(data.tokenizer);
    const [ranks, get] = [tokenizer.ranks, tokenizer.ranks.get.bind(tokenizer.ranks)];
    let n = 0;
    ranks.get = (pair) => { n++; return get(pair); };
    return [tokenizer.encode(arguments[1]), n];
"""
STATUS = """
    const section = document.querySelectorAll(".live")[arguments[0]];
    const data = JSON.parse(section.querySelector("script").textContent);
    const container = document.createElement("div");
    live(container, data);
    const area = container.querySelector("textarea");
    area.value = arguments[1];
    area.dispatchEvent(new Event("input"));
    requestAnimationFrame(() => arguments[2](container.querySelector(".status").textContent));
"""
KEYS_AND_CLICK = """
    const [area, status, button] = arguments;
    const shown = [..." is"].map((letter) => {
      area.value += letter;
      area.dispatchEvent(new Event("input"));
      return status.textContent;
    });
    button.click();
    return shown;
"""
BACKWARD = """
    const [, tokens, position, token, block, head, off] = arguments;
    const data = JSON.parse(document.querySelectorAll(".live > script")[arguments[0]].textContent);
    const model = new Model(data);
    const pass = new Pass(model);
    const finish = (job) => {
      for (;;) {
        const { done, value } = job.next();
        if (done) return value;
      }
    };
    finish(pass.read(tokens));
    const steps = Array.from(tokens, (_, key) => weightSteps(pass, block, head, position, key));
    const plain = (gradient) => JSON.stringify(gradient, (_, x) => (ArrayBuffer.isView(x) ? Array.from(x) : x));
    const whole = plain(finish(backward(pass, position, token)));
    model.size = 1e9; // four positions at a time
    const inParts = plain(finish(backward(pass, position, token)));
    finish(pass.read(tokens, new Map([[off, null]])));
    const ablated = finish(backward(pass, position, token));
    return [plain(steps), whole, inParts, plain(ablated)].map((text) => JSON.parse(text));
"""
PATCHES = """
    const data = JSON.parse(document.querySelectorAll(".live > script")[arguments[0]].textContent);
    const [model, first, second, token] = [new Model(data), ...[...arguments].slice(1)];
    const { n_blocks: L, n_heads: H } = model.config;
    const [full, other, swept, edited] = [1, 2, 3, 4].map(() => new Pass(model));
    const finish = (job) => { while (!job.next().done); };
    finish(full.read(first));
    finish(other.read(second));
    const at = first.length - 2; // what follows has no effect
    const base = logProbability(full.logits(at), token);
    const changes = { heads: full.keys.map(() => []), stream: full.keys.map(() => []) };
    model.size = 1e9; // four positions at a time
    const patch = (to) => patchAll(swept, first, other, { at, token, base }, to);
    const left = patch({ heads: full.keys.map(() => []), stream: full.keys.map(() => []) });
    for (let i = 0; i < 40; i++) left.next(); // and given up
    finish(patch(changes));
    const change = (name, value) => {
      finish(edited.read(first, new Map([[name, value]])));
      return logProbability(edited.logits(at), token) - base;
    };
    const again = {
      heads: changes.heads.map((row, b) => row.map((_, h) => change(`${b}.${h}`, other.output(b, h)))),
      stream: changes.stream.map((row, b) => row.map((_, t) => change(`${b}@${t}`, streamAt(other, b, t).slice()))),
    };
    finish(edited.read(first));
    const isBack = first.every((_, t) => edited.logits(t).every((logit, i) => logit === full.logits(t)[i]));
    return [base, changes, again, isBack];
"""
COMPARED = """
    const [live, done] = [document.querySelectorAll(".live")[arguments[0]], arguments[3]];
    const find = (css) => [...live.querySelectorAll(css)];
    const text = (css) => find(css).map((element) => element.textContent);
    const cells = () => find(".both tbody tr").map((line) => [...line.children].map((cell) => cell.textContent));
    find(".controls button").at(-1).click(); // start again, from the last position
    find(".patching > .plain")[0].click();
    const [area, maps] = [document.activeElement, () => find(".both .opens")];
    const copied = area.value;
    area.value = arguments[1];
    area.dispatchEvent(new Event("input"));
    const before = [copied, find(".pairs .differs").length, cells(), text(".both .told")[0], text(".both .status")[0]];
    const tile = find(".heads .tile")[arguments[2]];
    tile.querySelector("button").focus();
    const wait = () => {
      if (!text(".both .status")[1].startsWith("The maps")) return setTimeout(wait, 20);
      maps()[1].focus();
      const press = (key) => maps()[1].dispatchEvent(new KeyboardEvent("keydown", { key }));
      for (const key of ["Home", "ArrowDown", "ArrowRight", "Enter"]) press(key);
      const tips = [...maps()[1].closest(".columns > div").querySelectorAll(".tip")].map((tip) => tip.textContent);
      const wide = document.documentElement.scrollWidth - innerWidth;
      const after = [cells(), text(".both .told")[0], find(".both .patched").length, tips, text(".effect")[0], wide];
      find(".both button").find((button) => button.textContent === "Remove the patch").click();
      done([before, after, cells()[0].length]);
    };
    wait();
"""


EMPTIED = """
    const live = document.querySelectorAll(".live")[arguments[0]];
    const find = (css) => [...live.querySelectorAll(css)];
    const write = (area, text) => {
      area.value = text;
      area.dispatchEvent(new Event("input"));
      live.click(); // reads what was typed
      const [status] = find(".both .status");
      return [status.textContent, !!find(".both h3")[0].offsetParent];
    };
    const opener = find(".patching > .plain")[0];
    const isOpen = opener.getAttribute("aria-expanded") === "true";
    const [first] = find("textarea");
    first.value = "";
    first.dispatchEvent(new Event("input"));
    live.click();
    for (let i = 0; i < 1 + isOpen; i++) opener.click();
    const second = find("textarea")[1];
    const shown = [write(second, "a"), write(first, "a"), write(second, "a b"), write(second, "b"), write(second, "")];
    shown.push(write(second, "the state"), write(first, ""));
    find(".controls button").at(-1).click(); // start again
    return shown;
"""
SLOW = """
    const [section] = document.querySelectorAll(".live");
    const data = JSON.parse(section.querySelector("script").textContent);
    Object.defineProperty(Model.prototype, "size", { get: () => 1e9, set() {}, configurable: true });
    const container = section.parentNode.appendChild(document.createElement("div"));
    container.className = "live slow";
    live(container, data);
    const button = container.querySelector(".controls button");
    const shown = () => [container.querySelector(".status").textContent, container.ariaBusy, button.ariaDisabled];
    const area = container.querySelector("textarea");
    const first = shown();
    area.value = arguments[0];
    area.dispatchEvent(new Event("input"));
    container.click(); // reads what was typed
    container.querySelector(".heads input").click();
    container.querySelector(".heads input").click();
    button.click(); // adds no token to what is not yet computed
    return [first, shown()];
"""


@dataclass
class Case:
    """A model, and its place on the page."""

    index: int
    config: DecoderConfig
    params: Params
    tokenizer: Tokenizer


def large_section(
    model: Any, params: Params, tokenizer: Tokenizer, max_embedded: int,
    film: Sequence[tuple[int, Params]] = (), max_float16: int = 0,
) -> LiveSection:  # fmt: skip
    """Return the section of a model as if it were large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "FLOAT16_PARAMETERS", max_float16)
        patch.setattr(live, "MAX_EMBEDDED_BYTES", max_embedded)
        tokens_T = jnp.array(tokenizer.encode("The state"))
        return live_section(model, params, tokenizer, tokens_T, 100_000, "quick.weights", film)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Case]]:
    """Return a page with a section per model, and the models."""
    cases, sections = {}, []
    for index, (name, config) in enumerate(CONFIGS.items()):
        (model, params), tokenizer = build(config), TOKENIZERS[name]()
        tokens_T = jnp.array(tokenizer.encode("The state  of the Union🙃")[:-1])[:CONTEXT]  # ends within a character
        sections.append(live_section(model, params, tokenizer, tokens_T, 100_000))
        cases[name] = Case(index, config, round_params(params), tokenizer)
    (model, params), tokenizer = build(QUICK), cases["quick"].tokenizer
    earlier = jax.tree.map(lambda x: x / 2, params)
    lost = jax.tree.map(lambda x: x * np.inf, params)
    film = [(0, earlier), (1, lost), (7, params)]
    sections.append(live_section(model, params, tokenizer, tokens_T, 100_000, film=film))
    cases["film"] = Case(len(sections) - 1, QUICK, round_params(earlier), tokenizer)
    sections += [large_section(model, params, tokenizer, limit) for limit in (100_000, 0)]
    cases["button"], cases["file"] = (
        Case(index, QUICK, round_params(params, 8), tokenizer) for index in (len(sections) - 2, len(sections) - 1)
    )
    for bits, most in ((16, 100_000), (8, 0)):
        sections.append(large_section(model, params, tokenizer, 0, film, most))
        cases[f"film of {bits} bits"] = Case(len(sections) - 1, QUICK, round_params(earlier, bits), tokenizer)
    path = tmp_path_factory.mktemp("live") / "page.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "MAX_FILE_BYTES", FILE_BYTES)
        write_page(path, "live", [], sections)
        served = sections[cases["file"].index]
        for name, part in (served.files | {"page.html": render_page("served", [], [served]).encode()}).items():
            (path.parent / "served" / name).parent.mkdir(exist_ok=True)
            (path.parent / "served" / name).write_bytes(part)
    return path, cases


@pytest.fixture(scope="module")
def browser(page: tuple[Path, dict[str, Case]]) -> Iterator[Any]:
    with browsing(page[0]) as driver:
        wait_for(driver, "return document.querySelector('.live .status')")
        yield driver


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_the_models(page, browser, name: str):
    case = page[1][name]
    model, head = case.config.build(), case.config.n_heads - 1
    tokens_T = np.random.default_rng(0).integers(VOCAB, size=21)

    @jax.jit
    def apply(params: Params) -> tuple[jax.Array, jax.Array, jax.Array]:
        weights = []
        keep = lambda name, x: weights.append(x) or x  # noqa: E731
        with intervene("blocks.0.attention.pattern", keep):
            logits_TV = model.apply({"params": params}, jnp.array(tokens_T))
        with intervene("blocks.0.attention.z", lambda name, x: x.at[head].set(0)):
            return logits_TV, model.apply({"params": params}, jnp.array(tokens_T)), weights[0]

    logits_TV, ablated_TV, weights_HTT = apply(case.params)
    full, cached, ablated, maps, losses, again, computed, in_parts = browser.execute_script(
        LOGITS, case.index, tokens_T.tolist(), f"0.{head}"
    )
    assert_close(full, logits_TV, TOLERANCE)
    assert cached == again == full  # to the last bit
    assert computed == [1] * len(tokens_T)
    assert in_parts == [full, losses[0], [0, 4, 8]]
    assert_close(ablated, ablated_TV, TOLERANCE)
    assert_close(maps, weights_HTT[:, -1], TOLERANCE)
    for loss, x_TV in zip(losses, (logits_TV, ablated_TV), strict=True):
        nll_T = -jax.nn.log_softmax(x_TV)[np.arange(20), tokens_T[1:]]
        assert loss == pytest.approx(float(nll_T.mean()), abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "quick"])
def test_gradient_and_arithmetic_of_a_weight_equal_the_models(page, browser, name: str):
    case, position = page[1][name], 17
    model, block, head = case.config.build(), case.config.n_blocks - 1, case.config.n_heads - 1
    tokens_T = np.random.default_rng(1).integers(VOCAB, size=21)
    names = ("embed", "value_embed", "blocks.*.attention", "blocks.*.attention.*", "blocks.*.mlp")
    names = names if "value_embedding" in case.params else names[:1] + names[2:]

    token = int(tokens_T[position + 1])

    @jax.jit
    def differentiate(params: Params, factor: float) -> tuple[Any, Any]:
        def log_p() -> jax.Array:
            return jax.nn.log_softmax(model.apply({"params": params}, jnp.array(tokens_T))[position])[token]

        with intervene("blocks.0.attention.z", lambda name, x: x.at[head].multiply(factor)):
            return capture_gradients(log_p, names=names)

    values, grads = differentiate(case.params, 1.0)
    steps, whole, in_parts, ablated = browser.execute_script(
        BACKWARD, case.index, tokens_T.tolist(), position, token, block, head, f"0.{head}"
    )

    def assert_equals(got: Any, wanted: Any) -> None:
        wanted = np.asarray(wanted)
        np.testing.assert_allclose(np.reshape(got, wanted.shape), wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())

    seen = slice(position + 1)
    assert_equals(whole["embedding"], grads["embed"][seen])
    if "value_embed" in grads:
        assert_equals(whole["tokenValues"], grads["value_embed"][seen])
    of_parts, effects = {}, {}
    for i in range(case.config.n_blocks):
        name = f"blocks.{i}.attention.z"
        assert_equals(whole["heads"][i], grads[name][:, seen].swapaxes(0, 1))
        effects[i] = (values[name] * grads[name]).sum((1, 2))
        of_parts[i] = [(values[n] * grads[n]).sum() for n in (f"blocks.{i}.attention", f"blocks.{i}.mlp")]
    assert_equals([effect["heads"] for effect in whole["effects"]], np.array(list(effects.values())))
    assert_equals([[e["attention"], e["mlp"]] for e in whole["effects"]], np.array(list(of_parts.values())))
    assert_equals(in_parts["embedding"], np.array(whole["embedding"]))
    assert_equals(ablated["embedding"], differentiate(case.params, 0.0)[1]["embed"][seen])

    part = f"blocks.{block}.attention"
    group = head // (case.config.n_heads // case.config.kv_heads)
    row_S = values[f"{part}.pattern"][head, position]
    for key, step in enumerate(steps):
        v_K = values[f"{part}.v"][group, key]
        assert_close(step["q"], values[f"{part}.q"][head, position], TOLERANCE)
        assert_close(step["k"], values[f"{part}.k"][group, key], TOLERANCE)
        assert step["scale"] * step["sum"] == pytest.approx(
            float(values[f"{part}.attn_scores"][head, position, key]), abs=TOLERANCE
        )
        assert_close(step["weights"], row_S[step["start"] : position + 1], TOLERANCE)
        assert_close(step["added"], row_S[key] * v_K, TOLERANCE)
        assert_close(step["output"], values[f"{part}.z"][head, position], TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_equal_the_tokenizers(page, browser, name: str):
    case = page[1][name]
    labels, encoded = browser.execute_script(TOKENS, case.index, TEXTS)
    end, pieces = case.tokenizer.end_of_text, case.tokenizer.token_bytes
    assert labels == ["∅" if i == end else token_label(piece) or f"[{i}]" for i, piece in enumerate(pieces)]
    for text, (tokens, decoded) in zip(TEXTS, encoded, strict=True):
        assert tokens == case.tokenizer.encode_prompt(text), text
        assert decoded == case.tokenizer.decode(tokens), text


@pytest.mark.slow
def test_character_without_a_token_is_named_and_left_out(page, browser):
    case = page[1]["rung"]
    shown = browser.execute_async_script(STATUS, case.index, "a\x06b")
    assert shown.startswith("2 of at most 24 tokens; ␆ has no token, and is left out; 2 computed in")
    assert case.tokenizer.missing_bytes == b"\x04\x06\xc0\xc1"


@pytest.mark.slow
def test_activations_equal_the_models(browser):
    x = np.linspace(-6, 6, 97, dtype=np.float32)
    names = list(live.KNOWN["activation"])
    script = """
        const tables = [ACTIVATIONS, SLOPES];
        return arguments[0].map((name) => tables.map((table) => arguments[1].map((x) => table[name](x))));
    """
    got = browser.execute_script(script, names, x.tolist())
    for name, (y, slope) in zip(names, got, strict=True):
        np.testing.assert_allclose(y, ACTIVATIONS[name](x), rtol=0, atol=1e-5, err_msg=name)
        wanted = jax.vmap(jax.grad(ACTIVATIONS[name]))(x)
        np.testing.assert_allclose(slope, wanted, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_typing_switching_and_decoding_change_what_is_shown(page, browser):
    path, cases = page
    case = cases["quick"]
    live = browser.find_elements("css selector", ".live")[case.index]
    find = lambda css: live.find_elements("css selector", css)  # noqa: E731
    [area], [status] = find("textarea"), find(".status")
    labels = lambda: [button.get_property("textContent") for button in find(".tokens button")]  # noqa: E731
    shown = lambda: [value.text for value in find(".bars .value")]  # noqa: E731
    next_frame = lambda: browser.execute_async_script("requestAnimationFrame(arguments[0])")  # noqa: E731

    @jax.jit
    def p_V(tokens_T: jax.Array, factor: float) -> jax.Array:
        """Return the probabilities of the next token, with the output of head 1 of block 1 times a factor."""
        with intervene("blocks.1.attention.z", lambda name, x: x.at[1].multiply(factor)):
            return jax.nn.softmax(case.config.build().apply({"params": case.params}, tokens_T)[-1])

    assert area.get_property("value") == "The state  of the Union"
    area.send_keys(" is")
    next_frame()
    text = "The state  of the Union is"
    tokens = case.tokenizer.encode(text)
    assert labels() == [token_label(case.tokenizer.token_bytes[token]) for token in tokens]
    assert f"{len(tokens)} of at most 24 tokens; 1 computed in" in status.text
    percent = lambda p: f"{100 * p:.{1 if p < 0.1 else 0}f} %"  # noqa: E731
    before_V, after_V = (np.asarray(p_V(jnp.array(tokens), factor)) for factor in (1.0, 0.0))
    expected_V = np.sort(before_V)[::-1]
    assert shown() == [percent(p) for p in expected_V[:7]]
    assert len(find(".bars .bar")) == 7

    [box] = find('input[aria-label="head 1 of layer 1"]')
    box.click()
    assert "with the head ablated" in status.text
    likeliest = int(before_V.argmax())
    assert shown()[0] == f"{percent(before_V[likeliest])} → {percent(after_V[likeliest])}"
    box.click()
    assert "The last update read all of them and computed none." in find(".cache p")[0].text

    find(".controls button")[0].click()  # the likeliest token
    piece, shown_piece = case.tokenizer.decode([likeliest]), token_label(case.tokenizer.token_bytes[likeliest])
    assert area.get_property("value") == text + piece and labels()[-1] == shown_piece
    assert "; 1 computed in" in status.text
    assert f"{len(tokens) + 1} of 24 slots hold a token" in find(".cache p")[0].text

    for _ in range(5):  # the model has 600 tokens, many of which the tokenizer lacks
        find(".controls button")[0].click()
    assert not any(text.startswith("[") for text in labels())

    find(".tokens button")[2].click()
    assert find(".tokens .from")[0].text == labels()[2] and "Position 2, " in find(".note")[0].text
    assert [mark.text for mark in find(".bars .mark")] == ["in the text"]  # the token that follows
    find(".heads button")[3].click()
    assert "head 1 of layer 1 attends to" in find(".note")[0].text
    diagram = lambda css: [part.get_property("textContent") for part in find(f".block {css}")]  # noqa: E731
    assert diagram("h3") == ["Layer 1, part by part"] and diagram("text.way") == [f"position 2, “{labels()[2]}”"]
    assert f"{len(labels())}\u00d731" in diagram("text.shape") and diagram(".broken") == []
    box.click()
    assert diagram(".broken") == ["A V"] and "head 1: zeros" in diagram("text")
    box.click()

    area.clear()
    area.send_keys("x" * 40)
    next_frame()
    tokens = case.tokenizer.encode("x" * 40)
    assert f"{len(tokens)} tokens, of which the model uses the first 24" in status.text
    assert not find(".controls button")[0].is_enabled()
    pasted = "\n" * 100 + "y" * 5_000  # Chromium takes seconds to insert thousands of lines
    browser.execute_cdp_cmd("Input.insertText", {"text": pasted})
    next_frame()
    assert area.get_property("value") == ("x" * 40 + pasted)[:4096]
    area.clear()
    area.send_keys("a\b")
    next_frame()
    assert status.text == "0 of at most 24 tokens."
    assert not find(".columns")[0].is_displayed()
    find(".controls button")[2].click()  # start again
    assert area.get_property("value") == "The state  of the Union" and find(".columns")[0].is_displayed()
    before = status.text
    assert browser.execute_script(KEYS_AND_CLICK, area, status, find(".controls button")[0]) == [before] * 3
    assert area.get_property("value") == text + piece and labels()[-1] == shown_piece
    size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    assert complaints(browser) == []
    policy = path.read_text().split("Content-Security-Policy")[1].split(">")[0]
    assert "default-src 'none'; script-src 'sha256-" in policy and " 'unsafe-eval'" not in policy


@pytest.mark.slow
def test_tokens_are_appended_with_the_enter_key_alone(page, browser):
    from selenium.webdriver import Keys

    live = browser.find_elements("css selector", ".live")[page[1]["quick"].index]
    labels = lambda: live.find_elements("css selector", ".tokens button")  # noqa: E731
    browser.execute_script("arguments[0].click()", live.find_elements("css selector", ".controls button")[2])
    n = len(labels())
    live.find_element("css selector", ".bars .label").send_keys(Keys.ENTER)
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert len(labels()) == n + 2
    assert browser.switch_to.active_element == live.find_element("css selector", ".bars .label")


def likeliest(case: Case, section: Any) -> str:
    """Return the largest probability after the section's text, as it is shown."""
    text = section.find_element("css selector", "textarea").get_property("value")
    tokens_T = jnp.array(case.tokenizer.encode(text))
    p = float(jax.nn.softmax(live._logits(case.config.build(), case.params, tokens_T)[-1]).max())
    return f"{100 * p:.{1 if p < 0.1 else 0}f} %"


@pytest.mark.slow
def test_weights_in_8_bits_are_those_of_python(browser):
    _, params = build(CONFIGS["gemma"])
    names, rounded = pack_names(params), round_params(params, 8)
    data = {"arrays": names, "bits": 8, "group": GROUP, "weights": base64.b64encode(pack_params(params, 8)).decode()}
    numbers, keys = browser.execute_script(DECODED, data)
    assert keys == [name for name, _ in names]
    np.testing.assert_array_equal(np.float32(numbers), np.concatenate([x_N for _, x_N in flatten(rounded)]))


@pytest.mark.slow
def test_large_model_says_its_size_and_loads_at_a_click(page, browser):
    case = page[1]["button"]
    section = browser.find_elements("css selector", ".live")[case.index]
    button = section.find_element("css selector", ".offer button")
    size, n = len(pack_params(case.params, 8)), sum(x.size for x in jax.tree.leaves(case.params))
    takes = f"{size / 1e6:.3g} MB, and about {1.2 * (size + 4 * n) / 1e6:.2g} MB of memory"
    assert button.get_property("textContent") == f"Load the model ({takes})"
    assert not section.find_elements("css selector", "textarea")
    button.click()
    wait_for(browser, f"return document.querySelectorAll('.live')[{case.index}].querySelector('textarea')")
    assert section.find_element("css selector", ".bars .value").text == likeliest(case, section)
    assert not section.find_elements("css selector", ".offer")


@pytest.mark.slow
def test_weights_are_read_from_the_right_files_only(page, browser, tmp_path: Path):
    case = page[1]["file"]
    section = browser.find_elements("css selector", ".live")[case.index]
    [offer] = section.find_elements("css selector", ".offer")
    weights, status = pack_params(case.params, 8), offer.find_element("css selector", ".status")
    parts = [weights[at : at + FILE_BYTES] for at in range(0, len(weights), FILE_BYTES)]
    names = f"quick.weights.0 to {len(parts) - 1}"
    other = f"These are other weights than this page's: choose the {names} that it was written with."
    assert f"in {names}, in the folder that this page was written to. Choose all {len(parts)} files" in offer.text
    for contents, reason in (
        ([b"x", b"yz"], f"0, 1: 3 bytes, but this model's weights have {len(weights):,}. Choose {names}."),
        ([bytes(len(weights))], other),
    ):
        for i, content in enumerate(contents):
            (tmp_path / str(i)).write_bytes(content)
        chosen = "\n".join(str(tmp_path / str(i)) for i in range(len(contents)))
        field = offer.find_element("css selector", "input")
        browser.execute_script("arguments[0].value = ''", field)  # to which the driver would add
        field.send_keys(chosen)
        told = f"document.querySelectorAll('.live')[{case.index}].querySelector('.offer .status').textContent"
        wait_for(browser, f"return /Choose|choose/.test({told}) && {told}.includes('{reason[:9]}')")
        assert status.text == reason
    browser.execute_script(DROP, [list(part) for part in parts[::-1]])
    wait_for(browser, f"return document.querySelectorAll('.live')[{case.index}].querySelector('textarea')")
    assert section.find_element("css selector", ".bars .value").text == likeliest(case, section)
    assert browser.execute_script("return document.activeElement.tagName") == "TEXTAREA"
    browser.execute_async_script("setTimeout(arguments[0], 100)")  # for the second drop
    assert len(section.find_elements("css selector", "textarea")) == 1


class HaltedFiles(SimpleHTTPRequestHandler):
    """Files of a server, of which weights wait in the middle until the event is set."""

    go_on = Event()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        content = source.read()
        half = len(content) // 2
        outputfile.write(content[:half])
        if "weights" in self.path:
            self.go_on.wait(60)
        outputfile.write(content[half:])


@pytest.mark.slow
def test_page_that_is_served_fetches_its_weights_and_shows_how_far_it_is(page, browser):
    folder, case = page[0].parent / "served", page[1]["file"]
    last = max(folder.glob("quick.weights.*"))
    server = ThreadingHTTPServer(("localhost", 0), partial(HaltedFiles, directory=folder))
    Thread(target=server.serve_forever, daemon=True).start()
    first_tab = browser.current_window_handle
    browser.switch_to.new_window("tab")  # which is not offline
    browser.get(f"http://localhost:{server.server_port}/page.html")
    content = last.read_bytes()
    last.unlink()
    browser.find_element("css selector", ".offer button").click()
    bar = "document.querySelector('.offer progress')"
    wait_for(browser, f"return {bar}?.value > 0")
    size = len(pack_params(case.params, 8))
    assert browser.execute_script(f"return [{bar}.value, {bar}.max]") == [FILE_BYTES // 2, size]
    HaltedFiles.go_on.set()
    wait_for(browser, "return document.querySelector('.offer .status').textContent.includes('cannot')")
    told = browser.find_element("css selector", ".offer .status").text
    assert told == f"{last.name} cannot be fetched: status 404."
    assert browser.execute_script(f"return {bar}") is None
    [complaint] = complaints(browser)  # which no later test should find
    assert f"{last.name} - " in complaint and "404" in complaint
    last.write_bytes(content)
    browser.find_element("css selector", ".offer button").click()
    wait_for(browser, "return document.querySelector('textarea')")
    section = browser.find_element("css selector", ".live")
    assert section.find_element("css selector", ".bars .value").text == likeliest(case, section)
    browser.close()
    browser.switch_to.window(first_tab)
    server.shutdown()
    server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bits"), [("film", 16), ("film of 16 bits", 16), ("film of 8 bits", 8)])
def test_slider_of_the_film_moves_the_model(page, browser, name: str, bits: int):
    case = page[1][name]
    last = round_params(build(QUICK)[1], bits)
    section = browser.find_elements("css selector", ".live")[case.index]
    browser.execute_script("arguments[0].scrollIntoView()", section)
    if section.find_elements("css selector", ".offer"):
        browser.execute_script(DROP, [list(pack_params(case.params, bits) + pack_params(last, bits))])
    wait_for(browser, f"return document.querySelectorAll('.live')[{case.index}].querySelector('textarea')")
    value = lambda: section.find_element("css selector", ".bars .value").text  # noqa: E731
    after = value()
    assert after == likeliest(replace(case, params=last), section)
    slider, told = (section.find_element("css selector", f".frames {tag}") for tag in ("input", "output"))
    assert told.text == "step 7"
    slider.send_keys("\ue012")  # arrow left
    assert told.text == "step 0" and value() == likeliest(case, section) != after
    slider.send_keys("\ue014")  # arrow right
    assert told.text == "step 7" and value() == after


@pytest.mark.slow
def test_weight_and_token_open_panels_that_follow_text_and_heads(page, browser):
    from selenium.webdriver import Keys

    case = page[1]["llama"]
    live = browser.find_elements("css selector", ".live")[case.index]
    find = lambda css: live.find_elements("css selector", css)  # noqa: E731
    text = lambda css: find(css)[0].get_property("textContent")  # noqa: E731
    browser.execute_script("arguments[0].scrollIntoView()", live)  # which loads the model
    wait_for(browser, f"return document.querySelectorAll('.live')[{case.index}].querySelector('.why')")
    tokens, pattern = case.tokenizer.encode("The state  of the Union"), "blocks.0.attention.pattern"
    labels = [token_label(case.tokenizer.token_bytes[token]) for token in tokens]

    @jax.jit
    def log_p_V(factor: float) -> jax.Array:
        with intervene("blocks.0.attention.z", lambda name, x: x.at[0].multiply(factor)):
            return jax.nn.log_softmax(case.config.build().apply({"params": case.params}, jnp.array(tokens))[2])

    [matrix] = find(".map svg[tabindex]")
    matrix.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ENTER)
    assert text(".drill h3") == f"One weight: “{labels[2]}” (2) attends to “{labels[1]}” (1), head 0 of layer 0"
    watch = lambda params: capture(case.config.build(), params, jnp.array(tokens), names=pattern)[pattern]  # noqa: E731
    weights_HTT = jax.jit(watch)(case.params)
    weight = float(text(".drill .arithmetic li:last-child").split(" = ")[1].split(",")[0])
    assert weight == pytest.approx(float(weights_HTT[0, 2, 1]), rel=1e-3)
    assert text(".drill .softmax .marked td:nth-child(4)") == str(weight)
    matrix.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ENTER)
    assert "mask hides keys after the query (3 > 2): the weight is 0." in text(".drill .arithmetic")
    find(".drill .title button")[0].click()
    assert not find(".drill")[0].is_displayed()
    assert browser.switch_to.active_element == matrix

    name = find(".bars .label")[0].get_property("textContent")
    find(".why")[0].click()
    shown = lambda: text(".attribution [role=status]")  # noqa: E731
    wait_for(browser, f"return document.querySelectorAll('.live')[{case.index}].querySelector('.attribution table')")
    assert text(".attribution h3") == f"What “{name}” after “{labels[2]}” (2) depends on"
    token = case.tokenizer.encode(name.replace("␣", " "))[0]
    assert f"log-probability is {log_p_V(1.0)[token]:.4g} nats" in shown()
    find('input[aria-label="head 0 of layer 0"]')[0].click()
    wait = "return document.querySelectorAll('.live')[1].querySelector('.attribution [role=status]').textContent"
    wait_for(browser, f"{wait}.includes('nats')")
    assert f"log-probability is {log_p_V(0.0)[token]:.4g} nats" in shown()
    find('input[aria-label="head 0 of layer 0"]')[0].click()
    assert complaints(browser) == []


@pytest.mark.slow
def test_patches_equal_the_models(page, browser):
    case, at = page[1]["quick"], 10
    block = case.config.n_blocks - 1
    model = case.config.build()
    first, second = np.random.default_rng(1).integers(VOCAB, size=(2, at + 2))
    second[:2] = first[:2]
    token = int(second[-1])
    metric = lambda logits_TV: jax.nn.log_softmax(logits_TV[at])[token]  # noqa: E731
    heads = f"blocks.{block}.attention.z"

    @jax.jit
    def patch_heads(params: Params, first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
        source = capture(model, params, second, names=heads)[heads]

        def patched(head: jax.Array) -> jax.Array:
            with intervene(heads, lambda _, x: x.at[head].set(source[head])):
                return metric(model.apply({"params": params}, first))

        return metric(model.apply({"params": params}, first)), jax.lax.map(patched, jnp.arange(len(source)))

    texts = jnp.array(first), jnp.array(second)
    expected, of_heads = patch_heads(case.params, *texts)
    before = f"blocks.{block}.resid_pre"
    of_stream = patch_activations(model, case.params, [texts[0]], [texts[1]], before, metric)[before]
    base, changes, again, is_back = browser.execute_script(PATCHES, case.index, first.tolist(), second.tolist(), token)
    assert base == pytest.approx(float(expected), abs=TOLERANCE) and is_back
    assert_close(np.array(changes["heads"][block]) + base, of_heads, TOLERANCE)
    assert_close(np.array(changes["stream"][block]) + base, of_stream[: at + 1], TOLERANCE)
    assert np.abs(changes["heads"]).min() > 0 and not np.any(np.array(changes["stream"])[:, :2])
    for kind in ("heads", "stream"):
        assert_close(changes[kind], np.array(again[kind])[:, : at + 1], 1e-6)


@pytest.mark.slow
def test_second_text_and_ablation_show_the_models_numbers(page, browser):
    case, (block, head), second = page[1]["llama"], (1, 2), "The state  of a strong line"
    model, tokenizer = case.config.build(), case.tokenizer
    browser.execute_script("document.querySelectorAll('.live')[arguments[0]].scrollIntoView()", case.index)
    wait_for(browser, f"return document.querySelectorAll('.live')[{case.index}].querySelector('.status')")
    size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    before, after, n_columns = browser.execute_async_script(
        COMPARED, case.index, second, block * case.config.n_heads + head
    )
    copied, n_different, rows, told, status = before
    first, other = tokenizer.encode(copied), tokenizer.encode(second)
    n, name = min(len(first), len(other)), f"blocks.{block}.attention.z"

    @jax.jit
    def apply(params: Params) -> tuple[jax.Array, ...]:
        run = lambda tokens: model.apply({"params": params}, jnp.array(tokens))  # noqa: E731
        source = capture(model, params, jnp.array(other), names=name)[name]
        with intervene(name, lambda _, x: x.at[1, :n].set(source[1, :n])):
            patched = run(first)
        with intervene(name, lambda _, x: x.at[head].set(0)):
            ablated = run(first)
        return tuple(jax.nn.log_softmax(x) for x in (run(first), run(other), patched, ablated))

    full, compared, patched, ablated = (np.asarray(x) for x in apply(case.params))
    at = n - 1
    difference = np.abs(np.exp(full[at]) - np.exp(compared[at]))
    target = int(difference.argmax())
    percent = lambda x: f"{100 * np.exp(x):.{1 if np.exp(x) < 0.1 else 0}f}\u00a0%"  # noqa: E731
    signed = lambda x: f"{x:+.3f}".replace("-", "\u2212")  # noqa: E731
    assert n_different == max(len(first), len(other)) - sum(a == b for a, b in zip(first, other, strict=False))
    assert status.startswith(
        f"The texts have {len(first)} and {len(other)} tokens, of which the first {n} are compared"
    )
    best = int(full[at].argmax())
    assert rows[0][1:] == [percent(x[at, best]) for x in (full, compared)]
    assert f"changes by {signed(compared[at, target] - full[at, target])} nats." in told
    assert f"after position {at} " in told
    assert after[0][0][1:] == [percent(x[at, best]) for x in (full, compared, patched)]
    change = signed(patched[at, target] - full[at, target])
    assert f"; with the output of head 1 of layer 1 from the second text, by {change} nats" in after[1]
    assert after[2] == 1 and [tip.startswith(f"head 1 of layer 1: {change} nats") for tip in after[3]] == [True]
    likeliest = int(full[-1].argmax())
    loss = lambda x: -x[np.arange(len(first) - 1), first[1:]].mean()  # noqa: E731
    assert f"as the next token by {signed(ablated[-1, likeliest] - full[-1, likeliest])} nats" in after[4]
    assert after[4].endswith(f"the mean loss of the text by {signed(loss(ablated) - loss(full))}.")
    assert after[5] <= 0 and n_columns == 3
    assert complaints(browser) == []


@pytest.mark.slow
def test_texts_are_compared_where_they_differ(page, browser):
    longer, other = (len(page[1]["quick"].tokenizer.encode(text)) for text in ("a b", "the state"))
    compared, same = "tokens, of which the first is compared; they", "are the same: change the second text."
    assert browser.execute_script(EMPTIED, page[1]["quick"].index) == [
        ["The first text is empty.", False],
        [f"Both texts have one token; they {same}", False],
        [f"The texts have 1 and {longer} {compared} {same}", False],
        ["Both texts have one token; they differ at one position.", True],
        ["The second text is empty.", False],
        [f"The texts have 1 and {other} {compared} differ at one position.", True],
        ["The first text is empty.", False],
    ]
    assert complaints(browser) == []


@pytest.mark.slow
def test_long_computation_says_so_and_gives_way_to_what_is_typed(page, browser):
    tokenizer = page[1]["quick"].tokenizer
    text = "the \x00Union\x7f\x1b is strong"
    first, then = browser.execute_script(SLOW, text)
    assert first[0].startswith("Computing: 0 of ") and first[1:] == ["true", "true"]
    n = len(tokenizer.encode(text))
    assert then == [f"Computing: 0 of {n} positions …", "true", "true"]
    wait_for(browser, "return document.querySelector('.slow').ariaBusy === 'false'")
    assert browser.execute_script("return document.querySelector('.slow .controls button').ariaDisabled") == "false"
    [slow] = browser.find_elements("css selector", ".slow")
    assert f"{n} of at most 24 tokens; {n} computed in" in slow.find_element("css selector", ".status").text
    labels = [button.get_property("textContent") for button in slow.find_elements("css selector", ".tokens button")]
    assert "".join(labels) == "the␣␀Union␡␛␣is␣strong"  # nothing is invisible
    slow.find_element("css selector", ".why").click()
    wait_for(browser, "return document.querySelector('.slow .attribution table')")
    slow.find_element("css selector", "textarea").send_keys("!")
    again = "document.querySelector('.slow .attribution [role=status] button')"
    wait_for(browser, f"return {again}")  # a long gradient waits until it is wanted
    browser.execute_script(f"{again}.click()")
    wait_for(browser, "return document.querySelector('.slow .attribution table')")
    browser.execute_script("arguments[0].remove(); delete Model.prototype.size", slow)


@pytest.mark.slow
def test_pairs_of_a_long_word_are_looked_up_a_few_times_each(page, browser):
    """Each "he" makes a pair of a lower rank, with the "h" after it: a sweep of the word for each is quadratic."""
    case, word = page[1]["gemma"], "heh" * 1000
    tokens, n_lookups = browser.execute_script(LOOKUPS, case.index, word)
    assert tokens == case.tokenizer.encode_prompt(word)
    assert n_lookups < 20 * len(word)


def test_section_says_how_weights_are_stored():
    model, params = build(replace(QUICK, d_model=4, n_blocks=1, d_ff=(4,)))
    tokenizer = Tokenizer.train(CORPUS, 300)
    text = render_page("live", [], [live_section(model, params, tokenizer, jnp.array([1, 2, 3]), 100_000)])
    assert "parameters are stored as float16 (0.0" in text
    assert ", which changes the logits of the text below by at most 0.0" in text
    assert embedded(text, "Your own text")[0]["max_tokens"] == CONTEXT


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"experts": ExpertsConfig(2)}, "supports neither mixtures of experts"),
        ({"prefix": True}, "nor attention to a prefix"),
        ({"positions": "none", "rope": RoPE(interleaved=True)}, r"does not support RoPE\(.*interleaved=True"),
        (
            {"d_ff": (4096,)},
            "it has 291,728 parameters, but the limit is 100,000; raise `max_live_parameters`",
        ),
    ],
)
def test_model_that_the_script_does_not_run_is_a_reason(changes: dict, reason: str):
    model, params = build(rung_like(QUICK, **changes))
    with pytest.raises(NotImplementedError, match=reason):
        live_section(model, params, Tokenizer.train(CORPUS, 300), jnp.zeros(3, jnp.int32), 100_000)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("norm", "scale_norm"), ("activation", "mish"), ("norm_placement", "parallel"), ("positions", "alibi")),
        *(slow(field, True) for field in ("embedding_norm", "unembedding_bias")),
    ],
)
def test_a_norm_or_an_activation_that_the_script_lacks_is_a_reason(field: str, value: str):
    model, params = build(rung_like(QUICK))
    object.__setattr__(model.config, field, value)  # as after an edit of the package
    with pytest.raises(NotImplementedError, match=f"does not support the {field} {value}"):
        live_section(model, params, Tokenizer.train(CORPUS, 300), jnp.zeros(3, jnp.int32), 100_000)


def test_parameter_beyond_float16_is_a_reason():
    with pytest.raises(NotImplementedError, match="65,504"):
        round_params({"W": np.array([1.0, 70_000.0], np.float32)})


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("pre_tokenizer", {"type": "Whitespace"}, "not support the pre-tokenizer Whitespace"),
        ("normalizer", {"type": "Lowercase"}, "not support the normaliser Lowercase"),
        ("model", {"end_of_word_suffix": "</w>"}, "script does not support end_of_word_suffix of"),
        ("added_tokens", True, "not special"),
    ],
)
def test_tokenizer_that_the_script_does_not_run_is_a_reason(part: str, value: Any, reason: str):
    form = json.loads(Tokenizer.train(CORPUS, 300).as_json())
    if part == "added_tokens":
        form[part].append(form[part][0] | {"id": 300, "content": "<x>", "special": False})
    elif part == "model":
        form[part] |= value
    else:
        form[part] = value
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(form)), config={"eos_token": END_OF_TEXT})
    with pytest.raises(NotImplementedError, match=reason):
        pack_tokenizer(tokenizer)


def test_tokenizer_that_has_tokens_of_bytes_but_does_not_use_them_is_a_reason():
    with pytest.raises(NotImplementedError, match="without byte fallback"):
        pack_tokenizer(character_level(PREPENDED, None, byte_fallback=False))
