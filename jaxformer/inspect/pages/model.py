"""Page about a trained model: attention, residual stream, head ablation, gradients, and its training log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.contract import Task, contract_of
from jaxformer.data.dataset import Batch, evenly_spaced
from jaxformer.data.masked import mask_token
from jaxformer.data.pairs import TargetTokens, start_of_target
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.decode import translate_tokens
from jaxformer.decode.classify import classify, encode_labelled, match
from jaxformer.decode.fill_mask import MASK, encode_masked
from jaxformer.decode.prompts import Prompt
from jaxformer.decode.translation import encode_source
from jaxformer.errors import UserError
from jaxformer.files import write_atomically
from jaxformer.inspect.activations import Inputs, capture_shapes
from jaxformer.inspect.pages import model_sections
from jaxformer.inspect.pages.charts import Heatmap
from jaxformer.inspect.pages.contrast import contrast_sections
from jaxformer.inspect.pages.labels import token_label
from jaxformer.inspect.pages.lenses import lens_sections
from jaxformer.inspect.pages.live import LiveSection, film_frames, live_section
from jaxformer.inspect.pages.page import Section, Table, write_page
from jaxformer.inspect.pages.pictures import Picture, PictureSection, patch_attention, patch_grid, png_uri
from jaxformer.inspect.pages.training import training_sections
from jaxformer.models.objective import is_causal_lm
from jaxformer.runs.run import Run, count_parameters, load_data
from jaxformer.train.evaluate import ValidationData
from jaxformer.train.log import read_metrics, read_samples

FILM_PAGE = "film.html"
"""Name of the page about a run's film, in its folder."""
MAX_ATTENTION_WEIGHTS = 600_000
"""Maximum attention weights on a page; 3 weights take 4 bytes, so that the page stays below 1 MB."""
MAX_VALIDATION_TOKENS = 128
"""Maximum tokens of a held-out text on a page."""
N_LIVE_TOKENS = 24
"""Maximum tokens of the held-out text, cut at a word boundary, that the live section starts with."""
END = "∅"
"""Symbol of the end-of-text token."""
N_PICTURES, N_TRANSLATIONS = 8, 6
"""Held-out images and translations on a page."""
N_TOP_CLASSES = 4
"""Most probable classes or captions shown per image."""
LONG_SOURCE = 24
"""Maximum source tokens of the pair whose attention is shown."""
DEFAULT_TARGETS, MAX_DEFAULT_EXAMPLES = 1000, 256
"""Default number of targets that heads are measured on, and maximum number of examples."""
ABLATION_BUDGET, MIN_TARGETS = 3e12, 64
"""Parameters x heads x targets above which heads of a causal language model are measured on fewer targets, in shorter
windows, and minimum number of targets. Ablation takes about as many multiply-adds: half a minute on two cores."""


def write_model_page(
    run: Run,
    path: Path,
    prompt: str | None = None,
    n_examples: int | None = None,
    max_live_parameters: int = 0,
    progress: Callable[[str], object] = lambda _: None,
    text: ValidationData | None = None,
    source: str = "the text",
    lenses: bool = False,
    contrast: str | None = None,
) -> list[Path]:
    """Write the page about a run with a checkpoint to an HTML file. A prompt replaces the held-out text, and heads and
    gradients are measured on `n_examples` held-out examples. A causal decoder with at most `max_live_parameters`
    parameters runs live in the page; 0 omits that section. The parameters of a large one are in files beside the page,
    whose paths are returned. `progress` is called with the name of each part before it is made. A `text` of the name
    `source` replaces the run's own data; a run that was imported has none, so a prompt is then all that is measured.
    With `lenses`, lenses are fitted to held-out texts; `contrast` is a text that the prompt is compared with. Raises
    `UserError` if a text does not suit the model or the page, or there is neither data nor a prompt."""
    metrics, batch, reason = read_metrics(run.path), None, ""
    if text is not None or metrics or prompt is None:
        batch, source, reason = validation_batch(run, n_examples, text, source)
    example = _example(run, prompt, batch)
    other_T = None if contrast is None else _contrast(run, contrast, example)
    facts = [f"{type(run.model).__name__} of {count_parameters(run.params):,} parameters, at step {run.step:,}."]
    sections: list[Section] = []
    live: LiveSection | None = None
    text_of = lambda token: token_text(run, token)  # noqa: E731
    if example is not None:
        with ThreadPoolExecutor(1) as beside:  # the compiler uses one core
            own_text = None
            if max_live_parameters and is_causal_lm(run.model):
                progress("the model on your own text")
                tokenizer = run.text_model()[1]
                text_T = example[0] if prompt else first_words(tokenizer, example[0], N_LIVE_TOKENS)
                settings = max_live_parameters, f"{path.name}.weights", film_frames(run)
                own_text = beside.submit(live_section, run.model, run.params, tokenizer, text_T, *settings)
            mask = mask_token(*run.text_model()) if contract_of(run.model).task is Task.MASKED_LM else None
            progress("attention maps")
            sections.append(model_sections.attention_section(run.model, run.params, example, text_of, mask))
            progress("logit lens and logit attribution")
            sections += model_sections.residual_stream_sections(run.model, run.params, example, text_of)
        if own_text is not None:
            try:
                live = own_text.result()
            except NotImplementedError as error:
                facts.append(f"The model does not run in this page: {error}")
        if other_T is not None:
            sections += contrast_sections(run.model, run.params, example[0], other_T, text_of, progress)
    if lenses:
        data = load_data(run.path, run.config) if text is None else text
        sections += lens_sections(run.model, run.params, data, progress)
    if batch is not None:
        progress("held-out examples")
        sections += _task_sections(run, batch)
        measured_on = _describe(run, batch, source)
    elif example is not None:
        batch, measured_on = _as_batch(run, example), "the prompt only"
    if batch is not None:
        progress(f"statistics and ablation of heads, on {measured_on}")
        with ThreadPoolExecutor(1) as beside:
            others = beside.submit(_gradient_sections, run, batch, text_of if run.tokenizer else None, progress)
            heads = model_sections.head_sections(run.model, run.params, batch, progress)
        if heads:
            sections = [model_sections.with_ablation(section, heads[0]) for section in sections]
        measured = heads + others.result()
        if measured:
            facts.append(f"{'Heads and gradients' if heads else 'Gradients'} are measured on {measured_on}.")
        sections += measured
    if reason:
        facts.append(f"The data of the run cannot be read: {reason}")
    progress("the training log")
    training = training_sections(metrics, run.config.model, read_samples(run.path))
    weights = {path.with_name(name): part for name, part in live.files.items()} if live is not None else {}
    for file, part in weights.items():
        write_atomically(file, part)
    links = {"Film": FILM_PAGE} if path.with_name(FILM_PAGE).exists() else {}
    tabs: dict[str, Sequence[Section]] = {
        "Your text": [live] if live else [],
        "Measured": sections,
        "Training": training,
    }
    write_page(path.resolve(), f"{run.path.resolve().name}: inspection", facts, tabs, links)
    return list(weights)


def _gradient_sections(
    run: Run, batch: Batch, text_of: model_sections.TokenText | None, progress: Callable[[str], object]
) -> list[Section]:
    """Return the sections of per-example gradients."""
    progress("per-example gradients")
    return model_sections.gradient_sections(run.model, run.params, batch, text_of)


def first_words(tokenizer: Tokenizer, tokens_T: jax.Array, n: int) -> jax.Array:
    """Return at most n first tokens of a text, cut at a word boundary; n tokens if there is no boundary."""
    ends = [i for i in range(1, min(n + 1, len(tokens_T))) if tokenizer.token_bytes[int(tokens_T[i])][:1].isspace()]
    return tokens_T[: ends[-1] if ends else n]


def token_text(run: Run, token: int) -> str:
    """Return a token's label; for an id outside the tokenizer, the mask as in prompts or the id in brackets."""
    tokenizer = run.text_model()[1]
    if contract_of(run.model).task is Task.MASKED_LM and token == mask_token(*run.text_model()):
        return MASK
    if token >= tokenizer.vocab_size:
        return f"[{token}]"
    if token == tokenizer.end_of_text:
        return END
    return token_label(tokenizer.token_bytes[token]) or tokenizer.special_texts.get(token, f"[{token}]")


def validation_batch(
    run: Run, n: int | None = None, data: ValidationData | None = None, source: str = ""
) -> tuple[Batch | None, str, str]:
    """Return held-out examples of a text or, by default, of the run's data; the name of their source; and the reason
    why the run's data cannot be read, in place of examples."""
    if data is None:
        try:
            own = load_data(run.path, run.config)
        except UserError as error:
            return None, "", str(error)
        data, source = own, getattr(run.config.data, "path", "the run")
    n_targets = _default_targets(run)
    cut = lambda batch: batch  # noqa: E731
    if n_targets < DEFAULT_TARGETS:  # two examples, whose gradients are compared
        cut = lambda batch: jax.tree.map(lambda x: x[:, : -(-n_targets // 2)], batch)  # noqa: E731
    if n is None:
        n = min(MAX_DEFAULT_EXAMPLES, -(-n_targets // np.size(cut(next(data.val_batches(1, 1))).targets)))
    batch = cut(next(data.val_batches(n, n)))
    if batch.weights is not None:
        has_targets = np.flatnonzero(batch.weights.reshape(len(batch.weights), -1).any(axis=1))  # others fill the batch
        batch = jax.tree.map(lambda x: x[has_targets], batch)
    return batch, source, ""


def _default_targets(run: Run) -> int:
    """Return the number of targets that heads are measured on, smaller for a large causal language model."""
    contract = contract_of(run.model)
    if not is_causal_lm(run.model) or contract.has_prefix or contract.fixed_length or contract.attention is None:
        return DEFAULT_TARGETS
    n_heads = contract.attention.n_heads * max(1, len(contract.layer_windows))
    n = ABLATION_BUDGET / (n_heads * count_parameters(run.params))
    return min(DEFAULT_TARGETS, max(MIN_TARGETS, int(n)))


def _describe(run: Run, batch: Batch, source: str) -> str:
    """Return a description of held-out examples."""
    of_tokens = f" of up to {batch.inputs[0].shape[1]:,} tokens" if is_causal_lm(run.model) else ""
    return f"held-out data of {source}: {len(batch.inputs[0]):,} examples{of_tokens}"


def _task_sections(run: Run, batch: Batch) -> list[Section]:
    """Return the sections about held-out examples specific to the task: images, captions, translations."""
    task = contract_of(run.model).task
    if task is Task.IMAGE_CLASSIFICATION:
        return [_classified_images(run, batch)]
    if task is Task.CONTRASTIVE:
        return _matched_captions(run, batch)
    return [_translations(run, batch)] if task is Task.SEQUENCE_TO_SEQUENCE else []


def _classified_images(run: Run, batch: Batch) -> Section:
    """Return a section of images with their most probable classes and the attention over their patches."""
    chosen = evenly_spaced(len(batch.targets), N_PICTURES)  # images of a folder are ordered by class
    images = np.asarray(batch.inputs[0])[chosen]
    pictures = []
    for number, image_HWC, label in zip(chosen, images, np.asarray(batch.targets)[chosen], strict=True):
        p_V = np.asarray(classify(run.model, run.params, jnp.asarray(image_HWC)))
        names = run.classes or [str(i) for i in range(len(p_V))]
        pictures.append(_picture(image_HWC, f"held-out image {number}", names, p_V, int(label)))
    maps = patch_attention(run.model, run.params, (jnp.asarray(images),))
    about = "The most likely classes of held-out images."
    if maps:
        about += " Point at a patch for its attention weight."
    return PictureSection("Images", pictures, maps, patch_grid(run.model), about=about)


def _matched_captions(run: Run, batch: Batch) -> list[Section]:
    """Return sections of images with their best-matching held-out captions, and of the similarity of images and
    captions."""
    assert run.tokenizer is not None
    images, tokens_BT, valid_BT = (np.asarray(x) for x in batch.inputs)
    _, first, caption_of = np.unique(batch.targets, return_index=True, return_inverse=True)  # captions may be equal
    captions = [run.tokenizer.decode(tokens_BT[b][valid_BT[b]][1:-1].tolist()) for b in first]
    logits_BN = match(run.model, run.params, jnp.asarray(images), tokens_BT[first], valid_BT[first])
    p_BN = np.asarray(jax.nn.softmax(logits_BN))
    n = min(N_PICTURES, len(images))
    pictures = [_picture(images[b], f"held-out image {b}", captions, p_BN[b], int(caption_of[b])) for b in range(n)]
    maps = patch_attention(run.model, run.params, tuple(jnp.asarray(x[:n]) for x in (images, tokens_BT, valid_BT)))
    about = f"The best-matching of {len(captions):,} held-out captions, by zero-shot classification."
    matches = PictureSection("Images", pictures, maps, patch_grid(run.model), "its caption", about=about)
    shown = list(dict.fromkeys(caption_of[:n].tolist()))
    p_of_shown = p_BN[:n, shown]
    similarity = Heatmap(
        "Similarity of images and captions",
        p_of_shown,
        [f"image {b}" for b in range(n)],
        [captions[i] for i in shown],
        texts=[[f"{p:.0%}" for p in row] for row in p_of_shown],
        cell=(64, 56),
        images=[png_uri(image) for image in images[:n]],
        largest=1,
        about=f"Probability of each caption for each image, among {len(captions):,} captions.",
    )
    return [matches, similarity]


def _picture(image_HWC: np.ndarray, name: str, labels: Sequence[str], p_V: np.ndarray, actual: int) -> Picture:
    likeliest = [int(i) for i in np.argsort(-p_V)[:N_TOP_CLASSES]]
    probabilities = [(labels[i], float(p_V[i])) for i in likeliest]
    return Picture(image_HWC, name, probabilities, (labels[actual], float(p_V[actual])))


def _translations(run: Run, batch: Batch) -> Section:
    """Return a table of held-out sources, the model's greedy translations and the references."""
    config, tokenizer = run.text_model()
    sources_BS, valid_BS, references_BT = (np.asarray(x) for x in batch.inputs)
    longest = np.argsort(-valid_BS.sum(axis=1), kind="stable")[:N_TRANSLATIONS]
    sources = [sources_BS[b][valid_BS[b]].tolist() for b in longest]
    references = [references_BT[b][np.asarray(batch.weights)[b] > 0][1:].tolist() for b in longest]
    end, limit, special = tokenizer.end_of_text, config.context_length, TargetTokens.of(tokenizer)
    translations = translate_tokens(
        run.model, run.params, sources, end_of_text=end, context_length=limit, special=special
    )
    rows = [
        [tokenizer.decode(tokens) for tokens in texts] for texts in zip(sources, translations, references, strict=True)
    ]
    return Table("Translations", ("source", "greedy translation", "reference"), rows, about="Held-out sentences.")


def _example(run: Run, prompt: str | None, batch: Batch | None) -> Inputs | None:
    """Return the inputs for the prompt or a held-out example, without padding; None for a model without text, or with
    full windows only. Raises `UserError` if the prompt does not suit the run's model or the page."""
    if prompt is not None:
        run.text_model()  # raises for image models
    if run.tokenizer is None or contract_of(run.model).task is Task.CONTRASTIVE:
        return None
    if contract_of(run.model).fixed_length:
        if prompt is None:
            return None
        raise UserError("the run's model supports full windows only, which a page does not show; omit `prompt`.")
    if prompt is not None:
        example = _encode(run, Prompt(prompt, "`prompt`"))
    elif batch is not None:
        example = _validation_example(run, batch, MAX_VALIDATION_TOKENS)
    else:
        raise UserError("the run's data is not available; give a text with `prompt`.")
    maps = capture_shapes(run.model, run.params, *example, names=model_sections.MAPS, missing_ok=True)
    n_weights = sum(x.size for x in maps.values())
    if n_weights <= MAX_ATTENTION_WEIGHTS:
        return example
    n_tokens = max(len(x) for x in example if jnp.ndim(x))
    max_tokens = int(n_tokens * (MAX_ATTENTION_WEIGHTS / n_weights) ** 0.5)
    if prompt is None:
        assert batch is not None
        return _validation_example(run, batch, max_tokens)
    remedy = f"a page holds at most {MAX_ATTENTION_WEIGHTS:,}: shorten it to about {max_tokens} tokens"
    raise UserError(f"`prompt` has {n_tokens} tokens, and so the model {n_weights:,} attention weights; {remedy}.")


def _encode(run: Run, prompt: Prompt) -> Inputs:
    """Return the model's inputs for a prompt; for a sequence-to-sequence model, including its translation."""
    config, tokenizer = run.text_model()
    contract = contract_of(run.model)
    if contract.task in (Task.MASKED_LM, Task.TEXT_CLASSIFICATION, Task.TOKEN_CLASSIFICATION, Task.TEXT_EMBEDDING):
        tokens = (encode_masked if contract.task is Task.MASKED_LM else encode_labelled)(prompt, run)
        return jnp.array(tokens), jnp.ones(len(tokens), bool)
    if contract.task is Task.SEQUENCE_TO_SEQUENCE:
        return _with_translation(run, encode_source(prompt, run))
    tokens = tokenizer.encode_prompt(prompt.text)
    prompt.check_length(len(tokens), config.context_length, f"the context's {config.context_length}")
    # The first half of the text is the prefix, from which the second half is predicted.
    prefix = (jnp.int32(len(tokens) // 2),) if contract.has_prefix else ()
    return jnp.array(tokens), *prefix


def _contrast(run: Run, text: str, example: Inputs | None) -> jax.Array:
    """Return the tokens of the text that a prompt is compared with."""
    contract = contract_of(run.model)
    if example is None or not is_causal_lm(run.model) or not contract.has_residual_stream or contract.has_prefix:
        raise UserError(
            f"the run's {type(run.model).__name__} is no causal decoder with a residual stream; omit `contrast`."
        )
    other = _encode(run, Prompt(text, "`contrast`"))
    if len(other[0]) != len(example[0]):
        remedy = "give two texts whose tokens correspond; the command tokens shows them"
        raise UserError(f"`prompt` and `contrast` have {len(example[0])} and {len(other[0])} tokens; {remedy}.")
    if (other[0] == example[0]).all():
        raise UserError("`contrast` has the same tokens as `prompt`; give another text.")
    return other[0]


def _with_translation(run: Run, source: list[int]) -> Inputs:
    """Return the inputs for a source, with the model's own translation as the target."""
    config, tokenizer = run.text_model()
    end, limit, special = tokenizer.end_of_text, config.context_length, TargetTokens.of(tokenizer)
    [target] = translate_tokens(run.model, run.params, [source], end_of_text=end, context_length=limit, special=special)
    start = start_of_target(tokenizer)
    return jnp.array(source), jnp.ones(len(source), bool), jnp.array([start, *target][:limit])


def _validation_example(run: Run, batch: Batch, max_tokens: int) -> Inputs:
    """Return a batch's first example without padding; for translation, the longest source within the limits, with the
    model's own translation."""
    if contract_of(run.model).task is not Task.SEQUENCE_TO_SEQUENCE:
        return _first_unpadded(batch, max_tokens)
    lengths_B = np.asarray(batch.inputs[1]).sum(axis=1)
    suitable = lengths_B <= min(LONG_SOURCE, max_tokens)
    b = np.argmax(np.where(suitable, lengths_B, 0)) if suitable.any() else np.argmin(lengths_B)
    source_S, _, target_T = _with_translation(run, np.asarray(batch.inputs[0])[b][: lengths_B[b]].tolist())
    return source_S[:max_tokens], jnp.ones(min(len(source_S), max_tokens), bool), target_T[:max_tokens]


def _first_unpadded(batch: Batch, max_tokens: int) -> Inputs:
    """Return the inputs of a batch's first example without padding, each with at most `max_tokens` tokens."""
    example = jax.tree.map(lambda x: jnp.asarray(x[0]), batch)
    first, *rest = example.inputs
    if rest and rest[0] is None:  # the first packed document
        return (first[rest[1] == 1][:max_tokens],)
    if rest and rest[0].dtype == bool:
        first, rest[0] = first[rest[0]], rest[0][rest[0]]
    return tuple(x[:max_tokens] if x.ndim else jnp.minimum(x, max_tokens // 2) for x in (first, *rest))


def _as_batch(run: Run, example: Inputs) -> Batch | None:
    """Return a prompt as a batch of one example; None unless the model is a causal language model."""
    if not is_causal_lm(run.model) or len(example) > 1 or len(example[0]) < 2:
        return None
    tokens_T = example[0]
    return Batch((tokens_T[None, :-1],), tokens_T[None, 1:])
