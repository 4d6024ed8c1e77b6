"""Generating text: samplers that know no model, and an engine that knows no text."""

from jaxformer.decode.generate import Generation, Piece, generate
from jaxformer.decode.samplers import Sampling

__all__ = ["Generation", "Piece", "Sampling", "generate"]
