#!/usr/bin/env bash
# The ladder at the sources' own size, in pieces of nine minutes; see sources.py, whose options these are.
#
#     studies/sources.sh --data.path books/train --data.val-path books/val
#
# The same command continues. The status is 0 when all rungs have ended, and 3 when the time was over before.
here=$(cd "$(dirname "$0")" && pwd)
PYTHONPATH=${here%/*}${PYTHONPATH:+:$PYTHONPATH} exec "${PYTHON:-python3}" -m studies.sources "$@"
