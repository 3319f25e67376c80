"""What a command prints as its product."""

from __future__ import annotations

import json
import sys
from typing import Any

from megatron_rl.errors import StorageError
from megatron_rl.observe.output import lost_output
from megatron_rl.observe.summary import finite_or_null


def print_json(content: dict[str, Any]) -> None:
    """To stdout, indented, with null for numbers that JSON does not have."""
    sys.stdout.write(json.dumps(finite_or_null(content), indent=2, allow_nan=False) + "\n")


def refuse_to_lose_output() -> None:
    """For a command whose product is what it prints. Raises StorageError where its file could not take it."""
    error = lost_output(sys.stdout)
    if error is not None:
        raise StorageError(f"what was to be printed could not be written to stdout: {error.strerror}")
