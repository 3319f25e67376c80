"""Which panels a run's picture has, and what they are drawn from."""

import json
import math

import pytest
from matplotlib.figure import Figure

from megatron_rl.errors import ConfigError
from megatron_rl.observe.curves import draw_curves, plot_curves
from megatron_rl.observe.phase_clock import PhaseRun
from megatron_rl.observe.picture_style import STACKED
from megatron_rl.observe.pictures import draw_timeline


@pytest.fixture
def write(tmp_path):
    def write_records(*records):
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write_records


def panels(figure: Figure):
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def test_accuracy_starts_at_the_point_before_training(write):
    """Step 0 belongs to the curve and is labelled. Would not catch a label that covers the curve."""
    path = write(
        {"step": 0, "val-core/demo/acc/mean@1": 0.25},
        {"step": 1, "critic/score/mean": 0.5},
        {"step": 2, "critic/score/mean": 0.75, "val-core/demo/acc/mean@1": 1.0},
    )
    drawn = panels(draw_curves(path))
    assert list(drawn) == ["Held-out accuracy: demo/acc/mean@1", "Mean reward"]
    accuracy, reward = drawn.values()
    assert accuracy.lines[0].get_xydata().tolist() == [[0.0, 0.25], [2.0, 1.0]]
    assert [text.get_text() for text in accuracy.texts] == ["before 25.0%", "100.0%"]
    assert reward.lines[0].get_xydata().tolist() == [[1.0, 0.5], [2.0, 0.75]]


def test_log_panel_spans_whole_decades_and_skips_zeros(write):
    """A difference of 0 has no logarithm and leaves a gap. Would not catch a series of zeros alone looking empty."""
    key = "training/rollout_logprob_diff_max"
    path = write({"step": 1, key: 2e-6}, {"step": 2, key: 0.0}, {"step": 3, key: 5e-5}, {"step": 4, key: None})
    (axes,) = draw_curves(path).axes
    values = axes.lines[0].get_ydata()
    assert values[0] == 2e-6 and math.isnan(values[1]) and values[2] == 5e-5 and math.isnan(values[3])
    assert axes.get_yscale() == "log" and axes.get_ylim() == pytest.approx((1e-6, 1e-4))


def test_phases_are_stacked_without_totals_and_validation(write):
    """gen 2 s below update_actor 3 s. Would not catch colours that cannot be distinguished."""
    timing = {"timing_s/update_actor": 3.0, "timing_s/gen": 2.0, "timing_s/step": 5.0, "timing_s/testing": 9.0}
    (axes,) = draw_curves(write({"step": 1, **timing})).axes
    bars = {bars.get_label(): (bars[0].get_y(), bars[0].get_height()) for bars in axes.containers}
    assert bars == {"gen": (0.0, 2.0), "update_actor": (2.0, 3.0)}


def test_a_phase_has_one_colour_in_curves_and_timeline(write):
    """All phases that curves stack, in another order in the timeline, each with a colour of its own, and names that no
    table has. Would not catch colours that look alike.
    """
    names = [*STACKED]
    bars = {bars.get_label(): bars[0] for bars in draw_curves(write({"step": 1} | _timings(names))).axes[0].containers}
    ran = [
        PhaseRun("global_pool", name, place, place + 1.0) for place, name in enumerate(["slice", *names[::-1], "mine"])
    ]
    figure = draw_timeline(ran)
    drawn = dict(zip([one.name for one in ran], figure.axes[0].patches, strict=True))
    named = {text.get_text(): patch for text, patch in zip(*_legend(figure), strict=True)}
    for name in names:
        assert drawn[name].get_facecolor() == named[name].get_facecolor() == bars[name].get_facecolor()
    assert len({patch.get_facecolor() for patch in drawn.values()}) == len(ran)


def _timings(names):
    return {f"timing_s/{name}": 1.0 for name in names}


def _legend(figure: Figure):
    (legend,) = figure.legends
    return legend.get_texts(), legend.get_patches()


def test_loads_of_layers_are_rows_and_steps_are_columns(write):
    """Layer 2 before layer 10, a step without a number left empty. Would not catch colours that say nothing."""
    layers = {"actor/expert_load/layer_10": 1.5, "actor/expert_load/layer_2": 2.0}
    path = write({"step": 1, **layers}, {"step": 3, "actor/expert_load/layer_2": 3.0})
    axes = panels(draw_curves(path))["Load of experts by layer: busiest over mean"]
    table = axes.collections[0].get_array()
    assert table[0].tolist() == [2.0, 3.0] and table[1, 0] == 1.5 and table.mask[1, 1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["2", "10"]


def test_picture_is_written_and_nothing_to_draw_is_an_error(write, tmp_path):
    """Would not catch a picture that is there and unreadable."""
    output = tmp_path / "pictures" / "curves.png"
    plot_curves(write({"step": 1, "actor/entropy": 0.5}), output)
    assert output.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="no metric that has a panel; it holds actor/lr"):
        plot_curves(write({"step": 1, "actor/lr": 0.5}), output)
