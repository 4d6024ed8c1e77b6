"""Held-out prompts."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxformer.data.tokenizer import Tokenizer
from jaxformer.inspect.samples import validation_prompts


def test_prompts_begin_and_end_with_whole_characters():
    tokenizer = Tokenizer.train(["."], 257)  # one token per byte
    tokens = np.array(tokenizer.encode("a" + "é" * 200))
    data = SimpleNamespace(load=lambda *_: SimpleNamespace(corpus=SimpleNamespace(val=SimpleNamespace(tokens=tokens))))
    config = SimpleNamespace(data=data, train=SimpleNamespace(batch_size=1), seed=0)
    run: Any = SimpleNamespace(config=config, text_model=lambda: (None, tokenizer))
    prompts = validation_prompts(run)
    assert all(prompts) and "\ufffd" not in "".join(prompts)
