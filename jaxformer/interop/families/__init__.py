"""Families of published models, by name."""

from collections.abc import Mapping

from jaxformer.interop.families import decoders, encoder_decoders, encoders, gguf, layernorm_decoders, vision
from jaxformer.interop.families.tables import Family

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in (*decoders.ALL, *layernorm_decoders.ALL)}
"""Families of decoders by their `model_type`."""
ENCODERS: Mapping[str, Family] = {family.architecture: family for family in (*encoders.ALL, *vision.ALL)}
"""Families of encoders of texts and of images by their architecture; those without a head before others of their
`model_type`. Export takes the first that fits: a RoBERTa is a BERT whose positions begin at 0."""
ENCODER_DECODERS: Mapping[str, Family] = {family.architecture: family for family in encoder_decoders.ALL}
"""Families of encoder-decoders by their architecture."""

GGUF_FAMILIES: Mapping[str, Family] = {family.model_type: family for family in gguf.ALL}
"""Families of decoders by their architecture in GGUF."""
