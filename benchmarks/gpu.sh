#!/usr/bin/env bash
# Everything that is asked of a GPU, in less than nine minutes, and first whether attention is fused.
#
#     benchmarks/gpu.sh [--smoke] [--results FOLDER] [PART …]
#
# Each part stores its result as soon as it has one, and leaves the others their time if it fails or needs more than its
# own. The status is 0 if all succeeded, 1 if one failed, and 2 without a GPU. --smoke tries all of it at tiny shapes on
# any device, and stores nothing unless --results says where.
# PYTHON is an interpreter that has JAX for CUDA, Flax, optax, Orbax, torch and transformers; COMMIT names the commit
# where there is no git.
set -uo pipefail

#      part       seconds
parts='attention       70
       training       225
       kernels         40
       decoding       180'

here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=${here%/*}${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
size=--quick options=() chosen=() failed=() child=
names=$(awk '{print $1}' <<<"$parts" | xargs)

fail() {
  echo "error: $1" >&2
  exit 2
}

while (($#)); do
  case $1 in
    --smoke) size=$1 ;;
    --results)
      [[ -n ${2-} ]] || fail "--results needs a folder."
      options+=("$1" "$2")
      shift
      ;;
    *)
      [[ " $names " == *" $1 "* ]] || fail "there is no part '$1'; there are $names."
      chosen+=("$1")
      ;;
  esac
  shift
done

trap 'kill $child; exit 130' INT TERM
while read -r part seconds; do
  [[ ${#chosen[@]} == 0 || " ${chosen[*]} " == *" $part "* ]] || continue
  echo "== $part, at most $seconds s"
  timeout --kill-after=5 "$seconds" "${PYTHON:-python3}" -m benchmarks "$part" --gpu $size "${options[@]}" </dev/null &
  child=$!
  status=0
  wait $child || status=$?
  if ((status)); then
    failed+=("$part ($( ((status == 124 || status == 137)) && echo "out of time" || echo "status $status"))")
  fi
  ((status == 2)) && exit 2
done <<<"$parts"

if ((${#failed[@]})); then
  echo "== failed: ${failed[*]}" >&2
  exit 1
fi
echo "== all parts succeeded"
