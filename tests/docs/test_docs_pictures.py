"""Pictures of the docs: each is drawn from the committed data, in the common colours, with text that can be read."""

from __future__ import annotations

import re

import docs_pictures
import pytest
from matplotlib.patches import Rectangle
from pictures import diagrams

from megatron_rl.observe.colors import INK, LABEL, READABLE, WHITE, contrast, text_color
from megatron_rl.observe.phases import FURTHER, OCCASIONAL, STACKED, phase_color
from megatron_rl.parallel.rank_grid import RolloutGrid, TrainGrid


def test_contrast_by_hand() -> None:
    """WCAG's own examples: black on white 21, #767676 on white 4.54, #777777 4.48; equal colours 1."""
    assert contrast("#000000", WHITE) == pytest.approx(21) and contrast(INK, INK) == 1
    assert contrast("#767676", WHITE) == pytest.approx(4.54, abs=0.005)
    assert contrast(WHITE, "#777777") == pytest.approx(4.48, abs=0.005)


def test_text_on_every_phase_can_be_read() -> None:
    """Would not catch text that is drawn in another colour than `text_color` says."""
    fills = [*STACKED.values(), *OCCASIONAL.values(), *FURTHER, *diagrams.SHARDS]
    assert not [fill for fill in fills if contrast(text_color(fill), fill) < READABLE]
    assert contrast(LABEL, WHITE) >= READABLE


@pytest.mark.parametrize("name", docs_pictures.PICTURES)
def test_pictures_are_drawn(name, tmp_path) -> None:
    """Each without an error; a diagram's text is text. Would not catch a picture that nobody can understand."""
    file = docs_pictures.write(name, tmp_path)
    committed = docs_pictures.FOLDER / name
    assert committed.exists()
    if file.suffix == ".svg":
        assert file.read_text() == committed.read_text(), f"run python scripts/docs_pictures.py {name}"
        assert len(re.findall("<text", file.read_text())) > 5


def test_shards_of_the_picture_are_those_of_the_engine() -> None:
    """TP2 x PP2 and rollout TP2, by the grids of the package: a rank receives the other stage's part of its TP half."""
    train = TrainGrid(diagrams.NUM_RANKS, tp_size=2, pp_size=2)
    rollout = RolloutGrid(train, 2)
    for rank in range(diagrams.NUM_RANKS):
        assert divmod(diagrams.training_shard(rank), 2) == (train.pp_rank(rank), train.tp_rank(rank))
        assert {shard % 2 for shard in diagrams.rollout_shards(rank)} == {rollout.tp_rank(rank)}
        [(shard, sender)] = diagrams.missing(rank)
        assert divmod(shard, 2) == (1 - train.pp_rank(rank), train.tp_rank(rank))
        assert shard == diagrams.training_shard(sender)


def test_the_loop_has_the_colours_of_phases() -> None:
    """Would not catch a phase that the loop leaves out."""
    [axes] = diagrams.engine().axes
    drawn = {patch.get_gid(): patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_gid()}
    assert {*drawn} == {phase for _, phases, _ in diagrams.LOOP for phase in phases} and {*drawn} <= STACKED.keys()
    for phase, patch in drawn.items():
        red, green, blue, _ = (round(255 * share) for share in patch.get_facecolor())
        assert f"#{red:02x}{green:02x}{blue:02x}" == phase_color(phase)
