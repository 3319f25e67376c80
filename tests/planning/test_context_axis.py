"""Context parallelism in the search: layouts by hand, the bound that skips them, and what is offered."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from placing import ACTOR, enumerated, gpu, request, write_model

from megatron_rl.planning.layout_search.explain import explain
from megatron_rl.planning.layout_search.grids import Grid, GridShape, Room, context_axis
from megatron_rl.planning.layout_search.pools import Pools
from megatron_rl.planning.layout_search.request import MapRequest
from megatron_rl.planning.layout_search.search import Search
from megatron_rl.planning.layout_search.search_result import find_placements
from megatron_rl.planning.memory_report import memory_report
from megatron_rl.planning.preflight import preflight
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.run_plan import RunPlan

CP = f"{ACTOR}.megatron.context_parallel_size"


def long_answers(folder: Path, *keep: str, gpus: int = 4, memory: float = 4.0, layers: int = 6) -> MapRequest:
    """Answers of up to 32,512 tokens, 16,000 in the mean, four of them on few GPUs."""
    sizes = ("data.max_response_length=32512", f"{ACTOR}.ppo_max_token_len_per_gpu=32768")
    batch = ("data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4")
    model = write_model(folder / "model", num_hidden_layers=layers, max_position_embeddings=65536)
    return request(
        folder, gpus, "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", *sizes, *batch, *keep,
        model=model, hardware=gpu(memory), per_node=4, lengths=(128.0, 16000.0),
    )  # fmt: skip


def test_context_ranks_share_a_node_or_fill_whole_ones(tmp_path):
    """24 ranks on three nodes at TP2: not 3, of which a group would lie on two nodes. Would not catch
    another order of ranks.
    """
    work = long_answers(tmp_path).work
    model = dataclasses.replace(work.actor.sizes, num_attention_heads=12)

    def sizes(grid: Grid, room: Room) -> list[int]:
        return [one.cp for one in context_axis(grid, room)]

    room = Room((model,), GridShape(3, 8), False)
    assert sizes(Grid(tp=2), room) == [1, 2, 4, 12]
    assert sizes(Grid(tp=2), dataclasses.replace(room, a2a_heads=(12,))) == [1, 2]
    assert sizes(Grid(tp=8, pp=3), room) == [1]


def test_what_is_offered_with_context_parallelism_can_run(tmp_path):
    """Every rule, the whole ledger and the plan's own seconds, of the kept size. Would not catch a slower exchange."""
    asked = long_answers(tmp_path, f"{CP}=2")
    mapped = find_placements(asked, 3)
    for candidate in mapped.candidates:
        assert candidate.settings[CP] == 2 and "CP2" in str(candidate.placed.choices[0].grid)
        config = copy.deepcopy(candidate.config)
        assert [str(one) for one in preflight(config, config_only=True)] == []
        report = memory_report(config, RunModels(config), asked.hardware)
        assert report.fits
        for pool, stages in report.pools.items():
            assert max(stage.peak for stage in stages) <= candidate.memory[pool].peak
        assert candidate.seconds == pytest.approx(RunPlan.of(config, asked.hardware, asked.lengths).step_seconds)
        assert candidate.estimate == pytest.approx(candidate.seconds, rel=0.04)


def test_other_sizes_are_explained(tmp_path):
    """Where two ranks share a sequence, one takes longer or does not fit. Would not catch sizes above 16."""
    mapped = find_placements(long_answers(tmp_path, memory=4.5), 1)
    assert mapped.candidates[0].settings[CP] == 2
    chosen, *others = explain(mapped, CP)
    assert chosen.value == 2 and {other.value for other in others} == {1, 4}
    for other in others:
        assert other.candidate is None or other.candidate.seconds >= mapped.candidates[0].seconds


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([6, 8]),
    st.sampled_from([2.5, 4.0, 6.0]),
    st.sampled_from(["p2p", "a2a", "all_gather"]),
    st.booleans(),
)
def test_the_bound_loses_nothing(tmp_path, layers, memory, way, short_batch):
    """The same seconds as enumeration of all layouts, where some need CP to fit and some gain by it; and every layout
    that cuts sequences takes at least its bound. Would not catch a bound of another kind of pass.
    """
    batch = 4 if short_batch else 16
    keep = [f"data.train_batch_size={batch}", f"{ACTOR}.megatron.override_transformer_config.cp_comm_type={way}"]
    work = long_answers(tmp_path, *keep, memory=memory, layers=layers).work
    best, found = min(enumerated(work), default=None), Search(work).run()
    assert (best is None) == (not found)
    if best is not None:
        assert found[0].seconds == pytest.approx(best)
    pools = Pools(work)
    for choice in pools.choices(("actor", "reference"), 1):
        grid = choice.grid
        assert grid is not None
        if grid.cp > 1:
            base = [pools.on_grid(name, dataclasses.replace(grid, cp=1), choice.shape) for name in choice.block]
            for kind, seconds in (("score", choice.score), ("update", choice.update)):
                least = sum(role.least_cut(kind, grid.cp) for role in base if kind in role.kinds)
                assert least <= seconds * (1 + 1e-9)
