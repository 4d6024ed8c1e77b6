"""Formats that a run is exported in."""

from typing import Literal

Format = Literal["safetensors", "stablehlo"]
Dtype = Literal["float32", "bfloat16", "float16"]
"""Format of exported weights."""
