"""Generating text: samplers that know no model, and an engine that knows no text."""

from jaxformer.decode.beam import Beams, beam_search
from jaxformer.decode.generate import Generation, Piece, generate
from jaxformer.decode.samplers import Sampling
from jaxformer.decode.stopping import StopStrings

__all__ = ["Beams", "Generation", "Piece", "Sampling", "StopStrings", "beam_search", "generate"]
