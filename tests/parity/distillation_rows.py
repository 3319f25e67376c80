"""Distillation: every loss in every layout of rows with holes."""

from __future__ import annotations

from distillation_observations import MODES, Distilled, DistilledByTwo
from rows_with_holes import CP2, LAYOUTS, MEGATRON
from scenarios import ALWAYS, LONG, Row, Scenario
from sweeps import WEEKLY
from tiny_models import save_qwen2

OFTEN = ("k1", "forward_kl_topk", "reverse_kl_topk", "jsd")
"""What `make test` goes through, in one process: what is read of a teacher (drawn tokens, its likeliest tokens, those
of the student, whole distributions) in one mode each. The sweeps have these where TP cuts distributions, the one that
reads most beside the student in every layout, and the other modes in one process; the others in layouts, which are
other formulas of the same numbers, are weekly.
"""
WIDEST = "reverse_kl_topk"
UP_TO_CP2 = CP2 | {f"{MEGATRON}__dynamic_context_parallel": True}
"""Passes choose how many ranks share them."""


def when_of(mode: str, layout: str) -> tuple:
    if layout == "one":
        return ALWAYS if mode in OFTEN else LONG
    return LONG if mode == WIDEST or (mode in OFTEN and layout == "TP2") else WEEKLY


DISTILLED = (
    *(
        Row(
            Scenario(save_qwen2, "one process" if layout == "one" else layout, ranks, keys=keys),
            Distilled(mode),
            when_of(mode, layout),
        )
        for mode in MODES
        for layout, (ranks, keys) in (LAYOUTS | {"up to CP2 of 4 ranks": ((4, 1, 1), UP_TO_CP2)}).items()
    ),
    Row(Scenario(save_qwen2, "one process"), DistilledByTwo(), ALWAYS),
)
