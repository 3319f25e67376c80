"""Placements drawn at random, and the ablation that holds the choice against them."""

from __future__ import annotations

import dataclasses

import pytest
import yaml
from placing import FILE, gpu, request, write_model
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.config.load import read_config
from megatron_rl.planning.hardware import Overheads
from megatron_rl.planning.layout_search.exact_ranking import Finalists
from megatron_rl.planning.layout_search.random_placements import allocations, sampled
from megatron_rl.planning.layout_search.search import Search
from megatron_rl.planning.preflight import preflight
from megatron_rl.trials.ablation_file import read_ablation
from megatron_rl.trials.points import points_of

pytestmark = pytest.mark.instrument


@pytest.fixture
def request_of_demo(tmp_path):
    return lambda gpus: request(tmp_path, gpus)


def test_placements_are_drawn_from_all(request_of_demo):
    """Different ones, on all ranks, of more than one partition and layout, none of which the best beats unfairly: each
    passes the ledger. The same seed draws the same. Would not catch a draw that prefers some.
    """
    asked = request_of_demo(16)
    found = sampled(asked, 10)
    assert len({str(one.settings) for one in found}) == len(found) == 10
    assert all(one.placed.units == asked.cluster.num_units for one in found)
    assert len({one.placed.key for one in found}) > 2
    assert len({(one.placed.choices[0].grid, one.placed.choices[0].units) for one in found}) > 3
    assert [one.settings for one in sampled(asked, 10)] == [one.settings for one in found]
    assert [one.settings for one in sampled(asked, 10, seed=1)] != [one.settings for one in found]
    search = Search(asked.work)
    best = Finalists(search.work, search.names).best(search.run(), 1)[0]
    assert min(one.seconds for one in found) >= best.seconds * (1 - 1e-9)


def test_none_is_faster_where_pools_share_cores(tmp_path):
    """Four ranks of which two can work at once: of 30 placements none beats the best by 1%, which is left to
    micro-batches that suit a pool alone. Would not catch a clock that is wrong about sharing.
    """
    shared = dataclasses.replace(gpu(), parallel_ranks=2.0, overheads=Overheads(score_pass=0.1, update_pass=0.4))
    asked = request(tmp_path, 4, hardware=shared, per_node=4)
    search = Search(asked.work)
    best = Finalists(search.work, search.names).best(search.run(), 1)[0]
    found = sampled(asked, 30)
    assert len(found) == 30 and len({one.placed.key for one in found}) == 4
    assert min(one.seconds for one in found) >= 0.99 * best.seconds


def test_sizes_that_add_up(request_of_demo):
    """Two and three pools on 4 units of which one may be half a machine. Would not catch a size that is left out."""
    search = Search(request_of_demo(8).work)
    search.work.cluster.__dict__["sizes"] = [1, 2, 4]
    assert list(allocations(search, (("actor",), ("rollout",)), 4)) == [(2, 2)]
    assert sorted(allocations(search, (("actor",), ("rollout",), ("ref",)), 4)) == [(1, 1, 2), (1, 2, 1), (2, 1, 1)]


def test_points_are_an_ablation(tmp_path):
    """The file is read, every point is a valid run of the configuration, and the chosen one is the best. Would not
    catch runs that fail for another reason.
    """
    (tmp_path / "run.yaml").write_text(FILE + "algorithm: {adv_estimator: grpo}\n")
    model, points = write_model(tmp_path / "model"), tmp_path / "new" / "points.yaml"
    options = [
        "map",
        "--config",
        str(tmp_path / "run.yaml"),
        "--hardware",
        "h100",
        "--gpus",
        "8",
        "--points",
        str(points),
    ]
    finished = CliRunner().invoke(app, [*options, "--sample", "4", "--keep", f"actor_rollout_ref.model.path={model}"])
    assert finished.exit_code == 0, finished.output
    ablation = read_ablation(points)
    assert (ablation.chosen, ablation.baseline, ablation.hardware, ablation.repeats) == ("map", "map", "h100", 2)
    found = points_of(ablation, {})
    assert [point.name for point in found] == ["map", "random-1", "random-2", "random-3", "random-4"]
    for point in found:
        config, violations = read_config(ablation.config, point.overrides)
        assert config is not None and not violations
        assert not preflight(config, config_only=True), point.name


def test_pools_of_the_configuration_are_refused(tmp_path):
    """As points could not take them away. Would not catch pools that a kept value makes."""
    pools = "pools: {own: {nnodes: 1, n_gpus_per_node: 2}}\n"
    (tmp_path / "run.yaml").write_text(FILE + pools + yaml.safe_dump({"algorithm": {"adv_estimator": "grpo"}}))
    model = write_model(tmp_path / "model")
    options = ["map", "--config", str(tmp_path / "run.yaml"), "--hardware", "h100", "--gpus", "8"]
    options += ["--points", str(tmp_path / "points.yaml"), "--keep", f"actor_rollout_ref.model.path={model}"]
    finished = CliRunner().invoke(app, options)
    assert finished.exit_code == 1 and "needs a configuration without pools" in str(finished.exception)
