"""Formats for exporting a run."""

from typing import Literal

Format = Literal["hf", "safetensors", "gguf", "stablehlo"]
Dtype = Literal["float32", "bfloat16", "float16"]
"""Dtype of exported weights."""
