"""The laboratory computes in the browser what the library computes: gradients and training, intact and broken."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.inspect import intervene
from jaxformer.inspect.pages.page import ASSETS
from jaxformer.models.objective import Params, next_token_nll
from jaxformer.nn.attention import AXES
from jaxformer.nn.parameter_norms import dotted
from jaxformer.ops.masks import Causal, as_array
from tests.arrays import plain_rung
from tests.browser import browsing, complaints
from tests.helpers import ROOT
from tests.lab import built_page

SMALL = {"contextLength": 8, "width": 16, "heads": 2, "blocks": 2, "hidden": 24, "batchSize": 4, "learningRate": 0.005}
FAULTS = [
    (), ("no mask",), ("mask after softmax", "unscaled scores"), ("softmax over queries",),
    ("softmax over queries", "mask after softmax"), ("N(0, 1) weights",),
    ("no residual", "no norm", "no positions", "large learning rate"),
]  # fmt: skip
"""Each fault, and those that meet in one place together; the others stand apart, on the page as in the library."""


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """Chromium with the page, built from its sources."""
    with browsing(built_page()) as browser:
        browser.set_script_timeout(100)
        yield browser
        assert not complaints(browser)


def run(page: Any, script: str, *arguments: Any) -> Any:
    """Return the value of a script, the body of an asynchronous function of `a`."""
    body = f"const a = [...arguments], done = a.pop(), value = (async () => {{{script}}})();"
    result = page.execute_async_script(f"{body} value.then(done, e => done({{failed: `${{e}}`}}))", *arguments)
    assert not (isinstance(result, dict) and "failed" in result), result["failed"]
    return result


def create(page: Any, **options: Any) -> dict[str, Any]:
    """Create `window.one`, and return its config."""
    return run(
        page,
        "window.one = await lab.createLab({...lab.DEFAULT_CONFIG, ...a[0]}, lab.DEFAULT_TEXT); return one.config",
        options,
    )


class Reference:
    """The library's model with the page's parameters."""

    def __init__(self, page: Any, config: dict[str, Any]) -> None:
        self.page, self.faults, T = page, config["faults"], config["contextLength"]
        self.seen: dict[str, jax.Array] = {}
        has = self.faults.__contains__
        self.model = plain_rung(
            vocab_size=run(page, "return one.vocabulary.length"), context_length=T, d_model=config["width"],
            n_blocks=config["blocks"], n_heads=config["heads"], d_ff=(config["hidden"],), output_projection=True,
            norm="none" if has("no norm") else "rmsnorm", positions="none" if has("no positions") else "learned",
            residual=not has("no residual"), scaled=not has("unscaled scores"),
        ).build()  # fmt: skip
        self.shapes = jax.eval_shape(self.model.init, jax.random.key(0), jnp.zeros(T, jnp.int32))["params"]
        factor = run(page, "return lab.LARGE_LEARNING_RATE") if has("large learning rate") else 1
        self.optimizer = optax.sgd(config["learningRate"] * factor, config["momentum"], nesterov=True)
        self.params = self.read("parameter")
        self.state = self.optimizer.init(self.params)
        self.gradient = jax.jit(jax.value_and_grad(self.loss))

    def read(self, what: str) -> Params:
        """Return parameters or gradients of the page, by `Lab.parameter` or `Lab.gradient`."""
        H = self.model.config.n_heads

        def rows(name: str) -> list[str]:
            layer, _, matrix = name.rpartition(".")
            return [f"{layer}.heads.{h}.{matrix}" for h in range(H)] if matrix in AXES else [name]

        def leaf(path: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
            parts = [np.array(values[row], np.float32) for row in rows(dotted(path))]
            if len(like.shape) < 3:
                return jnp.asarray(parts[0].reshape(like.shape))
            head_axis = 0 if dotted(path).endswith("W_O") else 1
            shape = np.delete(like.shape, head_axis)
            return jnp.stack([part.reshape(shape) for part in parts], head_axis)

        names = [row for path, _ in jax.tree.leaves_with_path(self.shapes) for row in rows(dotted(path))]
        values = run(self.page, "return Object.fromEntries(a[1].map(name => [name, one[a[0]](name)]))", what, names)
        return jax.tree_util.tree_map_with_path(leaf, self.shapes)

    def loss(self, params: Params, batch_BT: jax.Array) -> jax.Array:
        """Return the mean loss of a batch."""
        with self.broken(batch_BT.shape[1] - 1):
            return jnp.mean(jax.vmap(lambda tokens_T: next_token_nll(self.model, params, tokens_T))(batch_BT))

    def broken(self, T: int) -> AbstractContextManager[None]:
        """Return a context in which the model has the faults that are no options of the library. It stores values of
        attention by name in `seen`."""
        causal = as_array(Causal(), T, T)
        visible = jnp.ones_like(causal) if "no mask" in self.faults else causal
        before = jnp.ones_like(causal) if "mask after softmax" in self.faults else visible
        axis = -2 if "softmax over queries" in self.faults else -1

        def edit(name: str, value: jax.Array) -> jax.Array:
            if name.endswith("mask"):
                value = visible
            if name.endswith("pattern"):
                scores = jnp.where(
                    before, self.seen[name.replace("pattern", "attn_scores")], jnp.finfo(jnp.float32).min
                )
                value = jnp.where(visible, jax.nn.softmax(scores, axis), 0)
            self.seen[name] = value
            return value

        return intervene("*.attention.*", edit)

    def train(self, steps: int) -> list[float]:
        """Train on the page's batches, and return the losses, up to the first step with a number not finite."""
        losses = []
        for batch in run(self.page, "return Array.from({length: a[0]}, (_, i) => one.batch(i))", steps):
            loss, gradient = self.gradient(self.params, jnp.array(batch))
            updates, self.state = self.optimizer.update(gradient, self.state)
            self.params = optax.apply_updates(self.params, updates)
            losses.append(float(loss))
            if not all(np.isfinite(x).all() for x in jax.tree.leaves([loss, self.params])):
                break
        return losses


def far(a: Params, b: Params) -> dict[str, float]:
    """Return the distance of two trees by parameter, relative to the norm of the second."""
    norm = lambda x: float(jnp.linalg.norm(x.ravel()))  # noqa: E731
    distances = jax.tree.map(lambda x, y: norm(x - y) / max(norm(y), 1e-30), a, b)
    return {dotted(path): x for path, x in jax.tree.leaves_with_path(distances)}


@pytest.mark.slow
@pytest.mark.parametrize("faults", FAULTS, ids=" + ".join)
def test_gradients_and_ten_steps_are_those_of_jax(page, faults):
    reference = Reference(page, create(page, **SMALL, faults=list(faults)))
    progress = run(page, "return await one.train(1)")
    loss, gradient = reference.gradient(reference.params, jnp.array(run(page, "return one.batch(0)")))
    assert progress["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert max(far(reference.read("gradient"), gradient).values()) < 1e-4
    # Nearly one-hot attention weights amplify rounding: parameters that differ by 1e-7 change JAX's own loss at step 10
    # by 0.5 %, and without the scale by 27 %.
    losses = reference.train(2 if "N(0, 1) weights" in faults else 10)
    progress = run(page, "return await one.train(a[0] - 1)", len(losses))
    assert progress["step"] == len(losses) and progress["loss"] == pytest.approx(losses[-1], rel=1e-3)


@pytest.mark.slow
def test_divergence_is_in_the_step_of_jax(page):
    reference = Reference(page, create(page, blocks=4, faults=["no norm", "large learning rate"]))
    losses = reference.train(20)
    progress = run(page, "return await one.train(20)")
    assert not progress["finite"] and abs(progress["step"] - len(losses)) <= 1
    assert run(page, "return await one.train(1)") == progress


@pytest.mark.slow
@pytest.mark.parametrize("faults", [[], ["softmax over queries", "no mask"]], ids=str)
def test_look_and_greedy_text_are_those_of_the_library(page, faults):
    reference = Reference(page, create(page, **SMALL, faults=faults))
    look = run(page, "return one.look(a[0])", "tested")  # shorter than the context
    tokens, vocabulary = look.pop("tokens"), run(page, "return one.vocabulary")
    assert [vocabulary[token] for token in tokens] == list("tested")
    with reference.broken(len(tokens)):
        reference.model.apply({"params": reference.params}, jnp.array(tokens))
    for what, blocks in look.items():
        expected = [reference.seen[f"blocks.{i}.attention.{what}"] for i in range(len(blocks))]
        np.testing.assert_allclose(blocks, expected, atol=1e-5)
    for _ in range(4):
        window = tokens[-SMALL["contextLength"] :]
        with reference.broken(len(window)):
            logits_TV = reference.model.apply({"params": reference.params}, jnp.array(window))
        tokens.append(int(logits_TV[-1].argmax()))
    assert run(page, "return one.generate(a[0], 4, 0)", "tested") == "".join(vocabulary[i] for i in tokens[6:])


@pytest.mark.slow
def test_theory_counts_on_the_training_part_and_measures_on_the_held_out_part(page):
    config = create(page, **SMALL)
    theory, text = run(page, "return [lab.theory(one.config, lab.DEFAULT_TEXT), lab.DEFAULT_TEXT]")
    characters, T = sorted(set(text)), config["contextLength"]
    V, n = len(characters), int(len(text) * 0.9)
    tokens = np.array([characters.index(character) for character in text])
    single = np.bincount(tokens[:n], minlength=V) + 1.0
    single /= single.sum()
    pairs = np.zeros((V, V))
    np.add.at(pairs, (tokens[: n - 1], tokens[1:n]), 1)
    pairs = (pairs + single) / (pairs.sum(1, keepdims=True) + 1)
    n_targets = 64 * T  # fewer than are held out
    before, after = tokens[n : n + n_targets], tokens[n + 1 : n + n_targets + 1]
    expected = {
        "uniform": np.log(V),
        "unigram": -np.log(single[after]).mean(),
        "bigram": -np.log(pairs[before, after]).mean(),
    }
    assert {name: theory[name] for name in expected} == pytest.approx(expected)
    assert run(page, "return one.vocabulary") == characters


@pytest.mark.slow
@pytest.mark.parametrize("faults", [[], ["unscaled scores"], ["no mask"], ["softmax over queries"]], ids=str)
def test_entropy_before_training_is_what_theory_predicts(page, faults):
    create(page, faults=faults)
    progress, theory = run(page, "return [await one.train(1), lab.theory(one.config, lab.DEFAULT_TEXT)]")
    assert np.mean(progress["entropy"], 1) == pytest.approx(theory["entropyAtStart"], rel=0.25)
    assert np.mean(progress["scoreVariance"]) == pytest.approx(16 if faults == ["unscaled scores"] else 1, rel=0.2)


@pytest.mark.slow
def test_committed_scripts_and_the_diagram_of_the_story_are_those_that_their_sources_build():
    committed = [
        *(ASSETS / name for name in ("page.css", "page.js", "live.css", "live.js")),
        ROOT / "docs/story/block.svg",
    ]
    for file in committed:
        assert (built_page().parent / file.name).read_text() == file.read_text(), "run `npm run build` in docs/lab"


@pytest.mark.slow
def test_page_loads_nothing_and_refuses_texts_in_one_sentence(page):
    assert run(page, "return performance.getEntriesByType('resource')") == []
    refusal = "return await lab.createLab({...lab.DEFAULT_CONFIG, ...a[0]}, a[1]).catch(e => e.message)"
    assert run(page, refusal, {}, "short") == "The text has 5 characters; give at least 340."
    assert run(page, refusal, {"heads": 3}, "") == "The width 64 is not a multiple of 3 heads; choose another number."
    many = "".join(map(chr, range(300))) * 2
    assert run(page, refusal, {}, many) == "The text has 300 different characters; give one with at most 256."
