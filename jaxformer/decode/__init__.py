"""Text generation: model-independent samplers, generation, beam search, speculative decoding and translation.

Names are imported on first use, so `jaxformer.decode.samplers` needs JAX but not Flax.
"""

from typing import TYPE_CHECKING

from jaxformer import lazy_names

if TYPE_CHECKING:
    from jaxformer.decode.beam import Beams, beam_search
    from jaxformer.decode.generation import Generation, Piece, generate
    from jaxformer.decode.samplers import Sampling
    from jaxformer.decode.speculative import DraftModel, PromptLookup, Speculation, speculate
    from jaxformer.decode.stopping import StopStrings
    from jaxformer.decode.streaming import GeneratedText, Throughput, stream_texts
    from jaxformer.decode.translation import translate, translate_tokens
    from jaxformer.decode.translation_scores import exact_match, scores

__all__ = [
    "Beams", "DraftModel", "GeneratedText", "Generation", "Piece", "PromptLookup", "Sampling", "Speculation",
    "StopStrings", "Throughput", "beam_search", "exact_match", "generate", "scores", "speculate", "stream_texts",
    "translate", "translate_tokens",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(__name__, {
    "beam": ("Beams", "beam_search"),
    "generation": ("Generation", "Piece", "generate"),
    "samplers": ("Sampling",),
    "speculative": ("DraftModel", "PromptLookup", "Speculation", "speculate"),
    "stopping": ("StopStrings",),
    "streaming": ("GeneratedText", "Throughput", "stream_texts"),
    "translation": ("translate", "translate_tokens"),
    "translation_scores": ("exact_match", "scores"),
})  # fmt: skip
