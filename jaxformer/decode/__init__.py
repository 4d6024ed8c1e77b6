"""Text generation: samplers that are independent of the model, and decoding that is independent of the text."""

from jaxformer.decode.beam import Beams, beam_search
from jaxformer.decode.generate import Generation, Piece, generate
from jaxformer.decode.samplers import Sampling
from jaxformer.decode.scores import exact_match, scores
from jaxformer.decode.speculative import DraftModel, PromptLookup, Speculation, speculate
from jaxformer.decode.stopping import StopStrings
from jaxformer.decode.streaming import GeneratedText, Throughput, stream_texts
from jaxformer.decode.translate import translate, translate_tokens

__all__ = [
    "Beams", "DraftModel", "GeneratedText", "Generation", "Piece", "PromptLookup", "Sampling", "Speculation",
    "StopStrings", "Throughput", "beam_search", "exact_match", "generate", "scores", "speculate", "stream_texts",
    "translate", "translate_tokens",
]  # fmt: skip
