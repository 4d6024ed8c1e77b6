#!/usr/bin/env bash
# Everything that is measured on a GPU, in less than nine minutes; options are those of benchmarks/train_gpu.py.
# COMMIT names the commit where there is no git; PYTHON, an interpreter that has JAX for CUDA, Flax, optax, Orbax and
# torch.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1
exec timeout --kill-after=5 530 "${PYTHON:-python3}" benchmarks/train_gpu.py "$@"
