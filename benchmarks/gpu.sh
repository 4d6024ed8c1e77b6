#!/usr/bin/env bash
# Everything that is measured on a GPU, in less than nine minutes. With options, which are those of
# benchmarks/train_gpu.py, training alone.
# COMMIT names the commit where there is no git; PYTHON, an interpreter that has JAX for CUDA, Flax, optax, Orbax,
# torch and transformers.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1

measure() {
  timeout --kill-after=5 "$1" "${PYTHON:-python3}" "benchmarks/$2" "${@:3}"
}

if (($#)); then
  measure 530 train_gpu.py "$@"
else
  status=0
  measure 380 train_gpu.py || status=$?
  measure 150 decode.py --device gpu --batch-sizes 1 64 --rounds 5 || status=$?
  exit "$status"
fi
