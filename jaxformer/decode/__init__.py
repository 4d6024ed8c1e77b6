"""Generating text: samplers that know no model, and an engine that knows no text."""

from jaxformer.decode.beam import Beams, beam_search
from jaxformer.decode.generate import Generation, Piece, generate
from jaxformer.decode.samplers import Sampling
from jaxformer.decode.scores import exact_match, scores
from jaxformer.decode.speculative import LookUp, ModelDraft, Speculation, speculate
from jaxformer.decode.stopping import StopStrings
from jaxformer.decode.streaming import Speed, Text, follow
from jaxformer.decode.translate import translate, translate_tokens

__all__ = [
    "Beams", "Generation", "LookUp", "ModelDraft", "Piece", "Sampling", "Speculation", "Speed", "StopStrings", "Text",
    "beam_search", "exact_match", "follow", "generate", "scores", "speculate", "translate",
    "translate_tokens",
]  # fmt: skip
