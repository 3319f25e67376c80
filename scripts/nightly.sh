#!/usr/bin/env bash
# The nightly gate (docs/nightly.md); arguments are options and overrides:
#   bash scripts/nightly.sh                         0 pass, 2 invalid configuration, 10 regression, 11 crash, 12 hang
#   bash scripts/nightly.sh --renew                 the golden file becomes what this run reaches
#   SWEEPS_ON=7 bash scripts/nightly.sh             on that day of the week (1 is Monday) all tests of ranks before it, each
#                                                   in processes of its own; code 10 if one fails
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CONFIG="${CONFIG:-configs/demo_cpu.yaml}"
GOLDEN="${GOLDEN:-configs/nightly_golden.json}"
FOLDER="${FOLDER:-outputs/nightly}"
PYTHON="${PYTHON:-$([[ -x .venv/bin/python ]] && echo "$PWD/.venv/bin/python" || echo python3)}"

[[ "$CONFIG" != configs/demo_cpu.yaml ]] || "$PYTHON" scripts/make_demo_assets.py
if [[ "${SWEEPS_ON:-}" == "$(date +%u)" ]]; then
    "$PYTHON" -m pytest -m "dist and not quiet" --fresh-worlds tests/dist || exit 10
fi
exec "$PYTHON" -m megatron_rl nightly --config "$CONFIG" --golden "$GOLDEN" --folder "$FOLDER" "$@"
