"""A step of the demo's engine whose environments and whose rule sleep, against its bounds."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from sleeping_tools import bench_config, measure

from megatron_rl.controller.repairs import repairs_of
from megatron_rl.controller.run import open_run


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.quiet
@pytest.mark.timeout(300)
def test_waits_are_hidden(tmp_path: Path) -> None:
    """64 episodes of one to six turns with log-normal delays: the quickest of three rounds takes at most 1.15 of the
    engine's seconds or the longest episode's delays, and turn by turn would take twice as long; of a rule's seconds at
    least 90% lie behind generation.

    Would not catch a machine that is busy for other reasons, whose engine has no room left.
    """
    given = argparse.Namespace(episodes=64, rounds=3, mean=0.4, slice_steps=16)
    config = bench_config(tmp_path, given)
    with repairs_of(config) as repairs, open_run(repairs) as run:
        rounds = measure(run, tmp_path, given)
    assert min(figures["step / bound"] for figures in rounds) <= 1.15
    assert max(figures["by turns"] / figures["step"] for figures in rounds) >= 2
    assert max(figures["hidden"] for figures in rounds) >= 0.9
