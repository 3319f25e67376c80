"""Pictures of the docs: each is drawn from the committed data, in the common colours, with text that can be read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import docs_pictures
import pytest
from docs_pictures import FOLDER, PICTURES
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text
from pictures import charts, diagrams, records, run_diagrams

from megatron_rl.observe.picture_style import (
    FURTHER,
    INK,
    LABEL,
    OCCASIONAL,
    READABLE,
    STACKED,
    WHITE,
    contrast,
    phase_color,
    text_color,
)
from megatron_rl.parallel.rank_grid import RolloutGrid, TrainGrid
from megatron_rl.trials.ablation_picture import SHOWN_AS
from megatron_rl.trials.result import PHASES

MOST_BYTES = 300_000
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=PICTURES)
def drawn(request: pytest.FixtureRequest) -> tuple[str, Figure]:
    """Each picture: its file's name and its figure."""
    return request.param, PICTURES[request.param]()


def texts_of(figure: Figure) -> list[Text]:
    """All texts of a figure that can be seen, those of legends too."""
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]


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


def test_text_of_every_picture_can_be_read(drawn) -> None:
    """Text that is not white is readable on white; white text lies in a bar or box. Titles begin with a capital.

    Would not catch dark text on a dark bar.
    """
    name, figure = drawn
    colors = {to_hex(text.get_color()) for text in texts_of(figure)} - {WHITE}
    assert not [color for color in colors if contrast(color, WHITE) < READABLE], name
    titles = [axes.get_title(loc=side) for axes in figure.axes for side in ("left", "center")]
    assert not [title for title in titles if title and title[0].islower() and not title.startswith("layout ")], name


def test_phases_have_their_colours(drawn) -> None:
    """In legends, stacked bars and boxes that are named after a phase. Would not catch a bar without a name."""
    name, figure = drawn
    named = [(patch.get_label(), patch) for patch in figure.findobj(Patch)]
    named += [(patch.get_gid(), patch) for patch in figure.findobj(Rectangle)]
    named += [
        (bars.get_label(), bar) for axes in figure.axes for bars in axes.containers if isinstance(bars, BarContainer)
        for bar in bars
    ]  # fmt: skip
    for legend in figure.findobj(lambda artist: hasattr(artist, "legend_handles")):
        named += [
            (text.get_text(), patch) for text, patch in zip(legend.get_texts(), legend.legend_handles, strict=True)
        ]
    colors = {phase: phase_color(phase) for phase in STACKED | OCCASIONAL}
    columns = {column: phase_color(phase) for column, phase in SHOWN_AS.items()} if name == "ablation.png" else {}
    wrong = {
        (label, to_hex(patch.get_facecolor())) for label, patch in named
        if isinstance(patch, Patch) and label in colors | columns
        and to_hex(patch.get_facecolor()) != (colors | columns)[label]
    }  # fmt: skip
    assert not wrong, name
    assert all(phase in PHASES[column] for column, phase in SHOWN_AS.items()) and SHOWN_AS.keys() == PHASES.keys()


def test_diagrams_are_current_and_their_text_is_text(tmp_path) -> None:
    """Would not catch a chart that is not of the record."""
    for name in (name for name in PICTURES if name.endswith(".svg")):
        made, committed = docs_pictures.write(name, tmp_path).read_text(), (FOLDER / name).read_text()
        assert made == committed, f"run python scripts/docs_pictures.py {name}"
        assert len(re.findall("<text", made)) > 5


def test_every_picture_is_drawn_by_the_script_and_shown() -> None:
    """But for the screenshots of `view`. Each is on a page; the records are small."""
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    shown = {name for page in pages for name in re.findall(r"pictures/([\w.]+)\)", page.read_text())}
    files = {file.name for file in FOLDER.iterdir() if file.is_file() and not file.name.startswith("view_")}
    assert files == PICTURES.keys() and files <= shown
    assert sum(file.stat().st_size for file in records.DATA.iterdir()) <= MOST_BYTES
    assert {file.stem for file in records.DATA.iterdir()} == records.RECORDS.keys()


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


def test_an_episode_trains_what_the_policy_sampled() -> None:
    """Would not catch parts in an order that no episode has."""
    assert {kind == run_diagrams.POLICY for *_, kind, _, sampled in run_diagrams.EPISODE if sampled} == {True}
    assert not any(kind == run_diagrams.POLICY for _, kind, _, sampled in run_diagrams.EPISODE if not sampled)


def test_the_ablations_table_is_what_the_picture_shows() -> None:
    """By hand: a row of a report, with the baseline's mark and two columns of one name."""
    page = (
        "<!-- begin of scripts/ablation_page.py -->\n"
        "| layout | step s | x | gen | log-probs | update | reshard | rest | tokens/s | per rank | x |"
        " received / least MB | exchange ms | memory / planned MB | x | reward |\n|---|---:|\n"
        "| **TP2 PP1** (baseline) | 1.33 (1.28 to 1.70) | 1.00 | 0.6 | 0.2 | 0.4 | 0.04 | 0.05 | 962 | 240 | 1.00 |"
        " 0.659 / 0.658 | 3.6 | 10.9 / 10.8 | 1.00 | 0.65 |\n\n- step s: median\n"
    )
    [row] = charts.ablation_rows(page)
    assert (row.name, row.is_baseline, row.result.num_ranks) == ("TP2 PP1", True, 4)
    assert row.result.step_s == (1.33, 1.28, 1.70) and row.result.phases_s["rest"] == 0.05
    assert (row.result.received_bytes, row.result.bound_bytes) == (659_000, 658_000)
    assert (row.result.memory_bytes, row.result.planned_memory_bytes) == pytest.approx((10.9e6, 10.8e6))


def test_the_table_of_recipes_is_the_record() -> None:
    """The accuracies of each row of measured.md but the demo's. Would not catch a row under another name."""
    rows = re.findall(r"^\| (?:`\w+_cpu.yaml`|the same)[^|]* \|.*$", charts.REPORT.read_text(), re.M)
    shown = [[cell.strip() for cell in row.split("|")[4:9]] for row in rows]
    recorded = json.loads((records.DATA / "recipes.json").read_text())
    expected = [
        [f"{accuracy:.3f}" for accuracy in recorded[name]["accuracy"].values()]
        for name in charts.RECIPES
        if name != "demo"
    ]
    assert shown[1 : len(expected) + 1] == expected
