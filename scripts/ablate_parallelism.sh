#!/usr/bin/env bash
# Compare parallel layouts (docs/plan/ablations.md); arguments are options and overrides of all points:
#   bash scripts/ablate_parallelism.sh --dry-run                      the points, valid or not, and what is planned
#   bash scripts/ablate_parallelism.sh                                run them; the same command again goes on
#   CONFIG=my_ablation.yaml FOLDER=outputs/mine bash scripts/ablate_parallelism.sh --retry-failed trainer.seed=2
# Exit codes: 0 all valid points finished, 2 nothing can run, 11 some failed, 129, 130 and 143 interrupted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CONFIG="${CONFIG:-configs/ablation.yaml}"
FOLDER="${FOLDER:-}" # for records and report; empty: the configuration's
PYTHON="${PYTHON:-$([[ -x .venv/bin/python ]] && echo "$PWD/.venv/bin/python" || echo python3)}"

if ! "$PYTHON" -c "import typer, omegaconf" 2> /dev/null; then
    echo "PYTHON=$PYTHON lacks the packages that this program needs; run first: make install" >&2
    exit 2
fi
exec "$PYTHON" -m megatron_rl ablate --config "$CONFIG" ${FOLDER:+--folder "$FOLDER"} "$@"
