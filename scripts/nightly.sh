#!/usr/bin/env bash
# The nightly gate (docs/nightly.md); arguments are options and overrides:
#   bash scripts/nightly.sh                         0 pass, 2 invalid configuration, 10 regression, 11 crash, 12 hang
#   bash scripts/nightly.sh --renew                 the golden file becomes what this run reaches
#   WEEKLY=1 bash scripts/nightly.sh                the tests that are too much for every day (docs/testing.md)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ "${WEEKLY:-0}" != 1 ]] || exec make test-weekly

CONFIG="${CONFIG:-configs/demo_cpu.yaml}"
GOLDEN="${GOLDEN:-configs/nightly_golden.json}"
FOLDER="${FOLDER:-outputs/nightly}"
PYTHON="${PYTHON:-$([[ -x .venv/bin/python ]] && echo "$PWD/.venv/bin/python" || echo python3)}"

[[ "$CONFIG" != configs/demo_cpu.yaml ]] || "$PYTHON" scripts/make_demo_assets.py
exec "$PYTHON" -m megatron_rl nightly --config "$CONFIG" --golden "$GOLDEN" --folder "$FOLDER" "$@"
