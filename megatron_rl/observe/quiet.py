"""Keep library chatter that says nothing about the user's run off the screen."""

from __future__ import annotations

import logging


def quiet_libraries() -> None:
    """Silence progress bars of `transformers` and a torch.fx notice about its own API; call before loading them."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
