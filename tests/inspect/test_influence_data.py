"""Which document each target of a repeated training belongs to."""

from types import SimpleNamespace

import numpy as np

from jaxformer.config import Config, TrainConfig
from jaxformer.data.windows import TextConfig
from jaxformer.inspect.influence import Replay
from jaxformer.runs.run import create_run
from tests.arrays import plain_decoder

LETTERS = ("abc", "def", "ghi")
"""Letters of each document, so that a token says which one it is from."""


def test_a_target_belongs_to_its_own_document_and_an_end_to_the_one_before_it(tmp_path):
    (tmp_path / "books").mkdir()
    rng = np.random.default_rng(0)
    for letters in (*LETTERS, "val"):
        file = tmp_path / ("val.txt" if letters == "val" else f"books/{letters}.txt")
        file.write_text("".join(rng.choice([*letters], 50)))
    model = plain_decoder(280, context_length=5, d_model=8, d_ff=(8,))
    data = TextConfig(str(tmp_path / "books"), val_path=str(tmp_path / "val.txt"))
    config = Config("test", model, data, steps=3, train=TrainConfig(batch_size=8))
    loaded = data.load(model, 8, config.seed)
    config = Config("test", loaded.model, data, steps=3, train=config.train)
    path = create_run(tmp_path / "run", config, loaded.tokenizer, allow_suffix=False)
    replay = Replay(SimpleNamespace(path=path, step=3, text_model=lambda: (loaded.model, loaded.tokenizer)))
    decode, end = loaded.tokenizer.decode, loaded.tokenizer.end_of_text
    n_ends = 0
    for batch, document_BT, _ in replay._inputs(0, 3):
        for first, targets, documents in zip(batch.inputs[0][:, 0], batch.targets, document_BT, strict=True):
            letters = decode([int(first)]).strip()
            for target, document in zip(targets.tolist(), documents.tolist(), strict=True):
                letters = decode([target]).strip() or letters
                if letters:  # else the row begins with a line break or an end of text
                    assert letters[0] in decode(replay.documents[document].tolist())
                    n_ends += target == end
    assert n_ends
