#!/usr/bin/env bash
# Everything that is measured on a GPU, in less than nine minutes; first, whether attention is fused: if not, it fails.
# With options, which are those of benchmarks/train_gpu.py, training alone; with --smoke, on any device.
# COMMIT names the commit where there is no git; PYTHON, an interpreter that has JAX for CUDA, Flax, optax, Orbax,
# torch and transformers.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

measure() {
  timeout --kill-after=5 "$1" "${PYTHON:-python3}" "benchmarks/$2" "${@:3}"
}

if [[ " $* " != *" --smoke "* ]]; then
  measure 60 attention.py
fi
if (($#)); then
  measure 530 train_gpu.py "$@"
else
  status=0
  measure 340 train_gpu.py || status=$?
  measure 130 decode.py --device gpu --batch-sizes 1 64 --rounds 5 || status=$?
  exit "$status"
fi
