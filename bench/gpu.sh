#!/usr/bin/env bash
# All that only a GPU can show, in one call of at most ten minutes; nothing is downloaded. Ends with the tables.
#   bench/gpu.sh                 # on the GPU; PYTHON names the interpreter that has torch
#   bench/gpu.sh --sections gemm,kernels
# Packages that the interpreter lacks are taken from wheels in the folder that WHEELS names (default .wheels), which
# `python -m bench.gpu.wheels` fills beforehand, where there is an index.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
wheels=${WHEELS:-.wheels}
if [ -d "$wheels" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
PYTHONUNBUFFERED=1 "$python" -m bench.gpu "$@"
