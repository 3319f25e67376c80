"""Keys of recomputed activations: what is refused, that every offer is valid, and the arithmetic of what is kept."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_folders import problems, write_model

from megatron_rl.config.megatron import OverrideTransformerConfig
from megatron_rl.planning.activations import Recompute
from megatron_rl.planning.option_rules import GROUP, nearest_number_of_layers
from megatron_rl.planning.preflight import preflight

KEYS = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
ACTOR = "actor_rollout_ref.actor"


def put_into(config, role: str, **keys) -> None:
    owner = config.actor_rollout_ref.actor if role == ACTOR else getattr(config, role)
    owner.megatron.override_transformer_config = OverrideTransformerConfig(**keys)


@pytest.mark.parametrize("role", [ACTOR, "critic"])
@pytest.mark.parametrize(
    "values",
    [
        ("full", "uniform", 1, None),
        ("full", "uniform", 2, None),
        ("full", "block", 1, None),
        ("full", "block", 2, None),
        (None, None, None, None),
        ("selective", None, None, None),
        ("selective", None, None, ["mlp", "core_attn"]),
    ],
)
def test_what_the_trainer_can_do_is_accepted(config, role, values):
    """6 layers on 3 stages, so 2 each. Would not catch one that the trainer cannot; `tests/dist` runs them."""
    put_into(config, role, **dict(zip(KEYS, values, strict=True)))
    assert problems(config) == []


@pytest.mark.parametrize("role", [ACTOR, "critic"])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((None, "uniform", None, None), ["recompute_method=uniform must be null, or recompute_granularity full"]),
        ((None, None, 3, None), ["recompute_num_layers=3 must be null"]),
        (("full", None, None, None), ["_method=null must be one of uniform, block", "_num_layers=null must be >= 1"]),
        (("full", "blok", 1, None), ["recompute_method=blok must be one of uniform, block"]),
        (("full", "uniform", 0, None), ["recompute_num_layers=0 must be >= 1"]),
        (("full", "uniform", 3, None), ["must, as recompute_method=uniform, divide the layers of a stage's chunks(2)"]),
        (("full", "block", 5, None), ["must, as recompute_method=block, be <= the layers of a stage's chunks(2)"]),
        (("selective", "uniform", 2, None), ["must be null: they count whole layers"]),
        (("selective", None, None, ["mlp", "layernorm"]), ["may name only core_attn, mlp, moe"]),
        (("selective", None, None, ["moe_act"]), ["may name only core_attn, mlp, moe"]),
        ((None, None, None, ["core_attn"]), ["must be null, or recompute_granularity selective"]),
        (("ful", "uniform", 6, None), ["recompute_granularity=ful must be full, selective or null"]),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(config, role, values, expected):
    """All offers together leave no violation. Would not catch a violation whose text misleads."""
    put_into(config, role, **dict(zip(KEYS, values, strict=True)))
    found = preflight(config)
    assert len(found) == len(expected)
    assert all(text in str(violation) for text, violation in zip(expected, found, strict=True)), found
    mended = dict(zip(KEYS, values, strict=True))
    for violation in found:
        assert all(key.startswith(f"{role}.{GROUP}.") for key in (*violation.settings, *violation.nearest))
        mended |= {key.rpartition(".")[2]: value for key, value in violation.nearest.items()}
    put_into(config, role, **mended)
    assert problems(config) == []


def test_each_role_goes_by_its_own_model(config, tmp_path):
    """A critic of 9 layers, 3 a stage, beside an actor of 6. Would not catch a third model."""
    config.critic.model.path = write_model(tmp_path / "critic", num_hidden_layers=9)
    put_into(config, ACTOR, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
    put_into(config, "critic", recompute_granularity="full", recompute_method="uniform", recompute_num_layers=3)
    assert problems(config) == []
    put_into(config, "critic", recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
    [problem] = problems(config)
    assert "divide the layers of a stage's chunks(3)" in problem and "critic" in problem


@given(st.lists(st.integers(1, 24), min_size=1, max_size=4), st.integers(-3, 60), st.sampled_from(["uniform", "block"]))
def test_offered_numbers_go_with_every_chunk(sizes, number, method):
    """And a valid number is its own nearest. Would not catch a nearer one that was passed over."""
    found = nearest_number_of_layers(method, number, sizes)
    assert 1 <= found <= max(sizes)
    assert method == "block" or math.gcd(*sizes) % found == 0
    assert nearest_number_of_layers(method, found, sizes) == found


def test_bytes_by_hand():
    """8 layers of input 1 and 10 needed. Would not catch a layer that keeps something else."""
    none, one, runs, block = Recompute(), Recompute("uniform", 1), Recompute("uniform", 4), Recompute("block", 6)
    assert [plan.kept_bytes(8, 1, 10) for plan in (none, one, runs, block)] == [80, 8, 2, 26]
    assert [plan.made_bytes(8, 10) for plan in (none, one, runs, block, Recompute("block", 8))] == [0, 10, 40, 0, 10]
    assert [plan.share([8, 4]) for plan in (none, one, runs, block)] == [0, 1, 1, 10 / 12]
