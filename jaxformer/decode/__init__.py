"""Generating text: samplers that know no model, and an engine that knows no text."""

from jaxformer.decode.beam import Beams, beam_search
from jaxformer.decode.generate import Generation, Piece, generate
from jaxformer.decode.samplers import Sampling
from jaxformer.decode.speculative import LookUp, ModelDraft, Speculation, speculate
from jaxformer.decode.stopping import StopStrings

__all__ = [
    "Beams", "Generation", "LookUp", "ModelDraft", "Piece", "Sampling", "Speculation", "StopStrings", "beam_search",
    "generate", "speculate",
]  # fmt: skip
