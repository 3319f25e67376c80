"""Rules of rows that are laid as a trie: what is refused, and which passes lay them so."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_folders import write_model
from test_model_folder import LATENT

from megatron_rl.config.load import load_config
from megatron_rl.config.roles import roles_of
from megatron_rl.planning.preflight import preflight

KEY = "actor_rollout_ref.model.enable_tree_training"
DEMO = Path("configs/demo_cpu.yaml")
MEGATRON = "actor_rollout_ref.actor.megatron"
CP2 = (f"{MEGATRON}.context_parallel_size=2", "trainer.n_gpus_per_node=8")
CUDA = ("trainer.device=cuda",)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            (*CP2, f"{MEGATRON}.dynamic_context_parallel=true"),
            "the columns of a trie are cut over all ranks alike",
        ),
        (
            (*CP2, *CUDA, f"{MEGATRON}.override_transformer_config.cp_comm_type=a2a"),
            "their kernels take the keys of whole rows end to end",
        ),
        (("actor_rollout_ref.model.use_remove_padding=false",), "rows that are filled up share nothing"),
    ],
)
def test_what_is_refused(overrides: tuple[str, ...], said: str) -> None:
    problems = "\n".join(map(str, preflight(load_config(DEMO, (f"{KEY}=true", *overrides)))))
    assert said in problems, problems
    assert said not in "\n".join(map(str, preflight(load_config(DEMO, overrides))))


def test_latent_attention_on_gpus_is_refused(tmp_path: Path) -> None:
    """On CPUs it is not: slots hold all of a prefix there."""
    path = f"actor_rollout_ref.model.path={write_model(tmp_path / 'latent', **LATENT)}"
    said = "is not supported on GPUs for latent attention"
    assert said in "\n".join(map(str, preflight(load_config(DEMO, (f"{KEY}=true", path, *CUDA)))))
    assert said not in "\n".join(map(str, preflight(load_config(DEMO, (f"{KEY}=true", path)))))


def test_every_pass_but_those_of_reward_models() -> None:
    """Actor, reference and critic of the demo; without the key none."""
    assert preflight(load_config(DEMO, (f"{KEY}=true",))) == []
    laid = {role.name: {spec.as_tree for spec in role.passes} for role in roles_of(load_config(DEMO, (f"{KEY}=true",)))}
    assert laid == {"actor": {True}, "reference": {True}, "critic": {True}, "rollout": set()}
    assert not any(spec.as_tree for role in roles_of(load_config(DEMO)) for spec in role.passes)
