"""Say which attention gpt2_124m uses on the devices here, and fail where it is not fused.

python benchmarks/attention.py
"""

from __future__ import annotations

import sys

from jaxformer.cli.arguments import load_config
from jaxformer.sharding import make_mesh
from jaxformer.train.kernels import FusedAttention
from jaxformer.train.setup import TrainSetup


def main() -> int:
    """Print the line; return 0 if attention is fused, 1 if not."""
    setup = TrainSetup(load_config("configs/gpt.py:gpt2_124m"), make_mesh())
    is_fused = isinstance(setup.attention, FusedAttention)
    print(f"{'fused' if is_fused else 'NOT FUSED'}; {setup.attention_line}", flush=True)
    if not is_fused:
        print("error: attention is not fused; docs/accelerators.md lists remedies.", file=sys.stderr)
    return int(not is_fused)


if __name__ == "__main__":
    sys.exit(main())
