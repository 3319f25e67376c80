"""Where a layer's experts are named, in the forms of the megatron-core versions that are known."""

from __future__ import annotations

import inspect
from functools import partial

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules

from megatron_rl.model.experts import StackedExperts
from megatron_rl.model.layer_specs import moe_submodules


def test_experts_are_put_into_the_installed_versions_layer() -> None:
    """Into the very object that the layer is built from. Would not catch a layer that looks elsewhere."""
    layer = get_gpt_layer_local_spec(num_experts=4, qk_layernorm=False, normalization="RMSNorm")
    moe_submodules(layer.submodules.mlp).experts = StackedExperts
    mlp = layer.submodules.mlp
    submodules = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
    assert isinstance(submodules, MoESubmodules) and submodules.experts is StackedExperts


def test_experts_are_put_into_a_partial() -> None:
    """As from 0.19 on. Would not catch a partial whose submodules are positional."""
    layer = partial(MoELayer, submodules=MoESubmodules(experts=None))
    moe_submodules(layer).experts = StackedExperts
    assert layer.keywords["submodules"].experts is StackedExperts


def test_experts_may_be_given_a_name() -> None:
    """By keyword only from 0.19 on, and not before."""
    given = inspect.signature(StackedExperts).bind(2, object(), pg_collection=object(), name="layer.experts")
    assert given.arguments["name"] == "layer.experts"
    inspect.signature(StackedExperts).bind(2, object(), pg_collection=object())
