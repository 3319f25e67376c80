"""The table of features: one row for each, by subject, and every pair in one row, that of the later feature."""

from __future__ import annotations

from megatron_rl.planning.feature_rows import (
    adapter_rows,
    algorithm_rows,
    async_rows,
    expert_rows,
    generation_rows,
    option_rows,
    run_rows,
)
from megatron_rl.planning.features import Feature

SUBJECTS = (run_rows, algorithm_rows, adapter_rows, option_rows, async_rows, generation_rows, expert_rows)
FEATURES: dict[str, Feature] = {row.name: row for subject in SUBJECTS for row in subject.ROWS}
"""Name -> row, in the order of messages."""
