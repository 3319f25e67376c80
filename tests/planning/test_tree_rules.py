"""Rules of rows that are laid as a trie: what is refused, and which passes lay them so."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config.load import load_config
from megatron_rl.config.roles import roles_of
from megatron_rl.planning.preflight import preflight

KEY = "actor_rollout_ref.model.enable_tree_training"
DEMO = Path("configs/demo_cpu.yaml")
MEGATRON = "actor_rollout_ref.actor.megatron"
CP2 = (f"{MEGATRON}.context_parallel_size=2", "trainer.n_gpus_per_node=8")
CUDA = ("trainer.device=cuda",)


def test_every_pass_but_those_of_reward_models() -> None:
    """Actor, reference and critic of the demo; without the key none."""
    assert preflight(load_config(DEMO, (f"{KEY}=true",))) == []
    laid = {role.name: {spec.as_tree for spec in role.passes} for role in roles_of(load_config(DEMO, (f"{KEY}=true",)))}
    assert laid == {"actor": {True}, "reference": {True}, "critic": {True}, "rollout": set()}
    assert not any(spec.as_tree for role in roles_of(load_config(DEMO)) for spec in role.passes)
