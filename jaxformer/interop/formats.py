"""Formats that a run is exported in."""

from typing import Literal

Format = Literal["hf", "safetensors", "gguf", "stablehlo"]
Dtype = Literal["float32", "bfloat16", "float16"]
"""Format of exported weights."""
