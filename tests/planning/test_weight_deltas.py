"""Sending only what changed: where it is refused, and what the plan says that it costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.load import load_config
from megatron_rl.config.schema import RunConfig
from megatron_rl.planning.memory import plan_pools
from megatron_rl.planning.plan_sections import delta_notes
from megatron_rl.planning.preflight import preflight
from megatron_rl.planning.run_models import RunModels

KEY = "actor_rollout_ref.rollout.weight_deltas"
DTYPE = "actor_rollout_ref.actor.megatron.dtype"
SPLIT, DEMO = Path("configs/split_cpu.yaml"), Path("configs/demo_cpu.yaml")


def loaded(*overrides: str, config: Path = SPLIT) -> RunConfig:
    return load_config(config, overrides)


def test_it_needs_a_rollout_on_ranks_of_its_own() -> None:
    """Would not catch a task without generation, which has no such key's use."""
    [problem] = map(str, preflight(loaded(f"{KEY}=true", config=DEMO)))
    assert "hybrid_engine=null do not go together: weights that stay on their ranks are not sent" in problem
    assert f"try: {KEY}=false; or give the rollout ranks of its own" in problem
    assert preflight(loaded(f"{KEY}=false", config=DEMO)) == preflight(loaded(f"{KEY}=true")) == []


@pytest.mark.parametrize(("dtype", "element"), [("bfloat16", 2), ("float32", 4)])
def test_training_ranks_hold_one_more_copy_of_the_model_among_them(dtype: str, element: int) -> None:
    """The demo on TP2: each rank keeps its half in every phase but the first. Indices: a bit for each element, and less
    than a bucket beside a message. Would not catch a rank that keeps more; tests/dist counts.
    """
    plain, deltas = (plan_pools(RunModels(loaded(f"{DTYPE}={dtype}", f"{KEY}={asked}"))) for asked in ("false", "true"))
    [before], [after] = plain["global_pool"], deltas["global_pool"]
    shard = before.phases["update_actor"]["actor parameters"]
    assert before.phases["init"] == after.phases["init"]
    for phase in before.phases.keys() - {"init"}:
        more = dict(after.phases[phase].items() - before.phases[phase].items())
        scratch = more.pop("indices of changes", 0)
        assert more == {"weights sent last": shard}
        assert scratch == (shard // element // 8 + shard if phase == "reshard" else 0)
    [before], [after] = plain["rollout"], deltas["rollout"]
    weights = before.phases["reshard"]["rollout weights"]
    assert after.phases["reshard"]["indices of changes"] == -(-weights // element // 8) + weights
    assert after.phases["gen"] == before.phases["gen"]


def test_the_plan_says_what_is_kept() -> None:
    """Would not catch a sentence that is printed nowhere."""
    assert delta_notes(RunModels(loaded())) == []
    [note] = delta_notes(RunModels(loaded(f"{KEY}=true", f"{DTYPE}=bfloat16")))
    assert "training ranks keep what they sent last, 0.67 MB at most on each" in note and "float32" not in note
    [note] = delta_notes(RunModels(loaded(f"{KEY}=true")))
    assert "nearly all weights of float32 change in a step" in note
