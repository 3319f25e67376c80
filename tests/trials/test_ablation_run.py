"""One process of an ablation: its time limit, and memory that there is not; and the folder it is alone in."""

from __future__ import annotations

import sys

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.trials.ablation import live, only_ablation
from megatron_rl.trials.outcome import Outcome, outcome_of

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("source", "limit", "expected"),
    [
        ("import time; time.sleep(600)", 0.3, Outcome.TIMED_OUT),
        ("import torch; torch.empty(2**60, dtype=torch.uint8)", 50.0, Outcome.OUT_OF_MEMORY),
        ("x = bytearray(2**60)", 50.0, Outcome.OUT_OF_MEMORY),
        ("1 / 0", 50.0, Outcome.CRASHED),
        ("print('MemoryError')", 50.0, Outcome.FINISHED),
    ],
)
def test_real_ends(tmp_path, source, limit, expected):
    """Would not catch a message of CUDA, Ray or the kernel, which take other machines."""
    ending = live([sys.executable, "-c", source], tmp_path / "output.txt", limit)
    assert outcome_of(ending) is expected, ending


def test_a_folder_is_one_ablations(tmp_path):
    """Not another's at the same time, and not what something else has written. Would not catch another machine's."""
    folder = tmp_path / "deep/mine"
    with only_ablation(folder), pytest.raises(ConfigError, match="another ablation is at work"), only_ablation(folder):
        pass
    with only_ablation(folder):
        pass
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").touch()
    says = "holds files of something else; nearest: .*other/ablation"
    with pytest.raises(ConfigError, match=says), only_ablation(tmp_path / "other"):
        pass
