"""Keep library chatter that says nothing about the user's run off the screen."""

from __future__ import annotations

import logging
import warnings

ENGINES = r"(megatron|vllm|torch)\b"
"""Modules whose warnings are about libraries that are not installed and names that will change."""


def quiet_libraries() -> None:
    """Silence progress bars of `transformers` and a torch.fx notice about its own API; call before loading them."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def quiet_engines() -> None:
    """Silence what the engines warn of where they run in this process; ranks of their own write to Ray's logs."""
    for category in (UserWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=ENGINES)
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
