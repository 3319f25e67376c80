#!/usr/bin/env bash
# The nightly gate (docs/plan/nightly.md); arguments are options and overrides:
#   bash scripts/nightly.sh                         0 pass, 2 invalid configuration, 10 regression, 11 crash, 12 hang
#   bash scripts/nightly.sh --renew                 the golden file becomes what this run reaches
#   WEEKLY=1 bash scripts/nightly.sh                the tests that are too much for every day (docs/internals/testing.md),
#                                                   after a report of what libraries have released since the last week
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CONFIG="${CONFIG:-configs/demo_cpu.yaml}"
GOLDEN="${GOLDEN:-configs/nightly_golden.json}"
FOLDER="${FOLDER:-outputs/nightly}"
PYTHON="${PYTHON:-$([[ -x .venv/bin/python ]] && echo "$PWD/.venv/bin/python" || echo python3)}"

if [[ "${WEEKLY:-0}" == 1 ]]; then
    mkdir -p outputs
    "$PYTHON" scripts/check_versions.py --moved outputs/upstream.json 2>&1 | tee outputs/upstream.txt || true
    exec make test-weekly
fi

# A report of this night, whatever ends it from here on; `megatron-rl nightly` writes it anew. Only in place of another
# nightly's, and not through a link.
say_in_report() {
    local report="$FOLDER/report.md"
    if [[ ! -e "$FOLDER" || ( -f "$report" && "$(head -c 10 "$report")" == "# Nightly:" ) ]]; then
        mkdir -p "$FOLDER"
        rm -f "$report"
        printf '# Nightly: not begun\n\n    bash scripts/nightly.sh\n\n%s\n' "$1" > "$report"
    fi
}
say_in_report "It began at $(date '+%F %T') and ended before the configuration was read; the log says why."
if ! "$PYTHON" -c "import typer, omegaconf" 2> /dev/null; then
    lacks="PYTHON=$PYTHON lacks the packages that this program needs; run first: make install"
    say_in_report "$lacks"
    echo "$lacks" >&2
    exit 2
fi

exec "$PYTHON" -m megatron_rl nightly --config "$CONFIG" --golden "$GOLDEN" --folder "$FOLDER" "$@"
