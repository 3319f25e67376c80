"""Prints of the user's code: the first to the screen, all further ones to a file. Errors are no prints."""

from __future__ import annotations

import builtins
from types import ModuleType
from typing import Any

PRINTS_FILE = "reward_prints.txt"
"""Prints of the reward function, in the folder of a run."""
MOST_SHOWN = 5
"""Prints of one process that are shown."""


class FirstPrints:
    """Stands for `print` in a file of the user's. A print that names its own `file` goes there, as always."""

    def __init__(self, noun: str, file: str) -> None:
        """noun: what prints. file: for what is not shown; where it cannot be written, everything is shown."""
        self._noun, self._file = noun, file
        self._num_shown, self._is_said = 0, False

    def __call__(self, *values: Any, **options: Any) -> None:
        """Print as Python's own."""
        if options.get("file") is None:
            if self._num_shown >= MOST_SHOWN and self._is_written(values, options):
                return
            self._num_shown += 1
        builtins.print(*values, **options)

    def _is_written(self, values: tuple[Any, ...], options: dict[str, Any]) -> bool:
        try:
            with open(self._file, "a", encoding="utf-8", errors="backslashreplace") as file:
                builtins.print(*values, **options | {"file": file})
        except OSError:
            return False
        if not self._is_said:
            self._is_said = True
            builtins.print(
                f"{self._noun} prints more than {MOST_SHOWN} times; the rest goes to {self._file}", flush=True
            )
        return True


def show_first_prints(module: ModuleType, noun: str, file: str) -> None:
    """Let functions of a module print through `FirstPrints`, unless the module has a `print` of its own."""
    vars(module).setdefault("print", FirstPrints(noun, file))
