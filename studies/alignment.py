"""A held-out sentence, its translation and its alignment, by a trained run of configs/translation.py.

    python -m studies.alignment runs/translation-bahdanau ["The sentence."]

Without a sentence, it takes the longest held-out one of at most `MAX_TOKENS` tokens whose greedy translation is that
of the data. studies/results/alignment.json gets it with the alignment, the scores of all held-out pairs, and the
steps and options of the run; docs/scripts/pictures.py draws it.
"""

import sys

import jax.numpy as jnp
import numpy as np

from benchmarks import record
from jaxformer.decode.translation import scores, translate, translate_validation
from jaxformer.inspect import alignment
from jaxformer.runs.run import load_run

MAX_TOKENS = 12


def main(folder: str, sentence: str = "") -> None:
    """Translate and store."""
    run = load_run(folder)
    config, (model, tokenizer) = run.config, run.text_model()
    data = config.data.load(config.model, config.train.batch_size, config.seed)
    hypotheses, references = translate_validation(run, run.params, data, 64)
    pairs = zip(data.val, hypotheses, strict=True)
    right = [source for (source, target), hypothesis in pairs if hypothesis == target]
    short = [source for source in right if len(tokenizer.encode(source)) <= MAX_TOKENS]
    source = sentence or max(short, key=lambda text: len(tokenizer.encode(text)))
    (target,) = translate(run.model, run.params, tokenizer, [source], context_length=model.context_length)
    source_S, target_T = tokenizer.encode(source), tokenizer.encode(target)
    inputs_T = jnp.array([tokenizer.end_of_text, *target_T])
    weights_TS = alignment(run.model, run.params, jnp.array(source_S), inputs_T)
    words = lambda tokens: [tokenizer.decode([token]) for token in tokens]  # noqa: E731
    figures = {
        "config": config.name, "step": run.step, "held_out_pairs": len(references),
        "identical_translations": len(right), **scores(hypotheses, references),
        "source": words(source_S), "target": [*words(target_T), ""],
        "weights": np.asarray(weights_TS).round(3).tolist(),
    }  # fmt: skip
    print(figures["source"], figures["target"], right, sep="\n")
    print({name: value for name, value in figures.items() if name != "weights"})
    record.write("alignment", figures, record.versions("jax", "flax"), record.STUDY_RESULTS)


if __name__ == "__main__":
    main(*sys.argv[1:])
