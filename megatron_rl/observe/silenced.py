"""Notices of libraries that a user cannot act on, each by its text, with the reason why it is not shown.

Whatever is not in these tables is shown, and errors always are.
"""

from __future__ import annotations

import logging
import warnings
from typing import NamedTuple


class Silenced(NamedTuple):
    """A warning. message: a regular expression that its text begins with."""

    message: str
    category: type[Warning]
    reason: str


WARNINGS = (
    Silenced(
        r"(Transformer Engine and )?Apex (is|are) not installed",
        UserWarning,
        "Megatron takes torch's kernels instead, and the plan refuses by name what needs the others",
    ),
    Silenced("full scope is deprecated", UserWarning, "Megatron's own default of a key that no run here sets"),
    Silenced(
        r"`torch\.distributed\.\w+` is deprecated",
        FutureWarning,
        "Megatron and vLLM call it; requirements/ pins the torch that still has it",
    ),
    Silenced(
        "`load_state_dict` is deprecated and will be removed",
        FutureWarning,
        "Megatron calls it of torch.distributed.checkpoint at every resume; requirements/ pins the torch that has it",
    ),
    Silenced(
        "torch.distributed is disabled, unavailable or uninitialized",
        UserWarning,
        "`export` and `average` read a checkpoint in one process on purpose",
    ),
)
LOGGERS = {
    "torch.fx._symbolic_trace": "a notice about torch's own interface, for its developers",
    "torch._library.triton": "says that a kernel has no GPU here, where none is used",
}
"""Logger of a library -> why only its errors are shown."""


def silence_libraries() -> None:
    """Show none of `WARNINGS`, and only errors of `LOGGERS`; call it before libraries are imported."""
    for silenced in WARNINGS:
        warnings.filterwarnings("ignore", message=silenced.message, category=silenced.category)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
