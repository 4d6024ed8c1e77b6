#!/usr/bin/env bash
# What is to be measured on a GPU, as a queue that continues from call to call; see gpu_queue.py, whose options these are.
#
#     benchmarks/gpu.sh --seconds 570
#
# PYTHON is an interpreter that has JAX for CUDA, Flax, optax, Orbax, torch and transformers; COMMIT names the commit
# where there is no git.
here=$(cd "$(dirname "$0")" && pwd)
PYTHONPATH=${here%/*}${PYTHONPATH:+:$PYTHONPATH} exec "${PYTHON:-python3}" -m benchmarks.gpu_queue "$@"
