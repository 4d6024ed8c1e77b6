"""Names of activations, those of TransformerLens where it has one."""

from __future__ import annotations

import re

from jaxformer.nn.capture import Path
from jaxformer.nn.parameter_norms import dotted


def activation_name(path: Path) -> str:
    """Return `blocks.0.attention.z` for `('blocks_0', 'attention', 'z')`, and `embed` for `('embedding', 'embed')`."""
    return re.sub(r"(\w*)embedding\.(pos_embed|embed)$", r"\1\2", dotted(path))
