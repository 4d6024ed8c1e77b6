"""Train the model that the site's first page lets readers type into, and write the page in which it runs.

python -m docs.scripts.front build/live.html
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxformer.data import Dataset, TextConfig
from jaxformer.data.text import SOTU, find_files
from jaxformer.inspect.pages.live import live_section
from jaxformer.inspect.pages.page import write_page
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.objective import Params, next_token_nll

ADDRESSES = "19[4-9]*.txt"
MODEL = DecoderConfig(
    vocab_size=1024, context_length=64, d_model=64, n_blocks=2, n_heads=4, qk_norm=True, d_ff=(256,),
    activation="squared_relu", bias=False, embedding_std=0.08, embedding_scale=12.0, unembedding_std=0.03,
)  # fmt: skip
BATCH_SIZE, STEPS, WARMUP_STEPS, LEARNING_RATE = 12, 300, 30, 5e-3
"""Few enough that the site is built in half a minute more; see `quick:modern` for a model that takes minutes."""
FRAMES = (0, 4, 20, 80, STEPS)
"""Steps whose parameters the page has, 0.5 MB each."""
TEXT = "The President of the United"
MAX_PARAMETERS = 500_000


def frames(model: nn.Module, data: Dataset) -> Iterator[Params]:
    """Train the model; yield its parameters after each step of `FRAMES`."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, WARMUP_STEPS, STEPS)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=0.1))

    @jax.jit
    def step(params: Params, state: optax.OptState, tokens_BT: jax.Array) -> tuple[Params, optax.OptState]:
        def loss(params: Params) -> jax.Array:
            return jax.vmap(lambda tokens_T: next_token_nll(model, params, tokens_T))(tokens_BT).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    key = jax.random.key(0, impl="rbg")  # whose draws compile in half the time
    params = jax.jit(model.init)(key, data.batch(0).inputs[0][0])["params"]
    state = optimizer.init(params)
    for k, batch in enumerate(data.stream(0, STEPS)):
        if k in FRAMES:
            yield params
        params, state = step(params, state, np.hstack([batch.inputs[0], batch.targets[:, -1:]]))
    yield params


def main(page: Path) -> None:
    """Write the page."""
    page.parent.mkdir(parents=True, exist_ok=True)
    addresses = find_files(SOTU).files[0].with_name(ADDRESSES)
    data = TextConfig(path=str(addresses)).load(MODEL, BATCH_SIZE, seed=0)
    model, tokenizer = MODEL.build(), data.tokenizer
    assert tokenizer is not None
    film = list(zip(FRAMES, frames(model, data), strict=True))
    tokens_T = jnp.array(tokenizer.encode_prompt(TEXT))
    section = live_section(model, film[-1][1], tokenizer, tokens_T, MAX_PARAMETERS, film=film)
    about = (
        f"{sum(size for _, size in section.arrays):,} parameters, trained for {STEPS} steps on the State of the Union "
        "addresses since 1940: type, play its training, point at tokens, clear the box of a head."
    )
    write_page(page, "A transformer to type into", [], [replace(section, about=about)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
