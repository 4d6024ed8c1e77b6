"""Names of parameters and modules as reports print them."""

import re
from collections.abc import Iterable


def dotted(path: Iterable[object]) -> str:
    """`('blocks_2', 'attention', 'W_Q')`, or a path of JAX's key objects, to `blocks.2.attention.W_Q`."""
    parts = [str(getattr(key, "key", key)) for key in path]
    return ".".join(re.sub(r"^(\w*blocks)_(\d+)$", r"\1.\2", part) for part in parts)
