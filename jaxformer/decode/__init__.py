"""Text generation: model-independent samplers, generation, beam search, speculative decoding and translation.

Names are imported on first use, so `jaxformer.decode.samplers` needs JAX but not Flax.
"""

from typing import TYPE_CHECKING

from jaxformer import lazy_names

if TYPE_CHECKING:
    from jaxformer.decode.beam import Beams, beam_search
    from jaxformer.decode.generation import Generation, generate_tokens
    from jaxformer.decode.samplers import Samples, Sampling, distribution, init_history, sample, update_history
    from jaxformer.decode.speculative import DraftModel, PromptLookup, Speculation, speculate
    from jaxformer.decode.streaming import GeneratedText, StopStrings, Throughput, stream_texts
    from jaxformer.decode.text import generate
    from jaxformer.decode.translation import exact_match, scores, translate, translate_tokens

__all__ = [
    "Beams", "DraftModel", "GeneratedText", "Generation", "PromptLookup", "Samples", "Sampling", "Speculation",
    "StopStrings", "Throughput", "beam_search", "distribution", "exact_match", "generate", "generate_tokens",
    "init_history", "sample", "scores", "speculate", "stream_texts", "translate", "translate_tokens", "update_history",
]  # fmt: skip

_NAMES = {
    "beam": ("Beams", "beam_search"),
    "generation": ("Generation", "generate_tokens"),
    "samplers": ("Samples", "Sampling", "distribution", "init_history", "sample", "update_history"),
    "speculative": ("DraftModel", "PromptLookup", "Speculation", "speculate"),
    "streaming": ("GeneratedText", "StopStrings", "Throughput", "stream_texts"),
    "text": ("generate",),
    "translation": ("exact_match", "scores", "translate", "translate_tokens"),
}
__getattr__, __dir__ = lazy_names(__name__, _NAMES)
