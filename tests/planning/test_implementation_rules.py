"""Who computes linear layers, and in how many bits: what is refused before anything starts, word for word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from model_folders import problems, write_model
from test_model_folder import GEMMA, LATENT

from megatron_rl.config.load import read_run
from megatron_rl.config.roles import roles_of
from megatron_rl.planning.implementation_rules import eight_bit_problems, implementation_problems
from megatron_rl.planning.model_folder import read_model_folder
from megatron_rl.planning.run_models import RunModels

MEGATRON = "actor_rollout_ref.actor.megatron"
GROUP = f"{MEGATRON}.override_transformer_config"
IMPL, FP8, EMULATE = f"{GROUP}.transformer_impl", f"{GROUP}.fp8", f"{MEGATRON}.fp8_emulate"


def found_with(config, device: str = "cpu", emulates: bool = False, **options) -> list[str]:
    megatron = config.actor_rollout_ref.actor.megatron
    megatron.fp8_emulate, config.trainer.device = emulates, device
    for name, value in options.items():
        setattr(megatron.override_transformer_config, name, value)
    actor = next(role for role in roles_of(config) if role.name == "actor")
    model, _ = read_model_folder("model", actor.model_path)
    return [str(one) for rule in (implementation_problems, eight_bit_problems) for one in rule(actor, model, device)]


@pytest.mark.parametrize(
    ("device", "emulates", "options", "expected"),
    [
        ("cuda", False, {"transformer_impl": "transformer_engine"}, []),
        ("cuda", False, {"transformer_impl": "te_linear", "fp8": "hybrid"}, []),
        ("cpu", True, {"fp8": "e4m3", "fp8_recipe": "tensorwise"}, []),
        (
            "cpu",
            False,
            {"transformer_impl": "te_linear"},
            [
                f"{IMPL}=te_linear needs trainer.device=cuda: transformer-engine computes on GPUs alone, not on cpu; "
                "try: local"
            ],
        ),
        (
            "cpu",
            False,
            {"fp8": "e4m3"},
            [
                f"{FP8}=e4m3 needs trainer.device=cuda: CPUs have no FP8 products; try: null; "
                f"{EMULATE}=true rounds as FP8 does, and is slow"
            ],
        ),
        (
            "cuda",
            False,
            {"fp8": "e4m3"},
            [f"{FP8}=e4m3 needs transformer-engine; try: {IMPL}=te_linear"],
        ),
        (
            "cuda",
            True,
            {"fp8": "e4m3", "transformer_impl": "te_linear"},
            [f"{EMULATE}=true is only for trainer.device=cpu: GPUs compute in FP8; try: false"],
        ),
        ("cpu", True, {}, [f"{EMULATE}=true needs {FP8}; try: false"]),
        (
            "cpu",
            True,
            {"fp8": "e4m3", "recompute_granularity": "selective"},
            [
                f"{GROUP}.recompute_granularity=selective is not emulated with {FP8}=e4m3: Megatron recomputes "
                "FP8 products with transformer-engine; try: null"
            ],
        ),
        (
            "cpu",
            True,
            {"fp8": "e4m3", "gradient_accumulation_fusion": True},
            [f"{GROUP}.gradient_accumulation_fusion=true is not emulated with {FP8}=e4m3; try: false"],
        ),
    ],
)
def test_what_is_refused(config, device, emulates, options, expected):
    """Would not catch a suggestion that is refused in turn."""
    assert found_with(config, device, emulates, **options) == expected


def test_models_whose_layers_are_the_projects_own(config, tmp_path: Path):
    """Latent attention, norms of 1 + w. Would not catch a family that says nothing of it."""
    config.actor_rollout_ref.model.path = latent = write_model(tmp_path / "latent", **LATENT)
    (problem,) = found_with(config, "cuda", transformer_impl="te_linear")
    assert (
        problem
        == f"{IMPL}=te_linear is not supported for latent attention, which {latent} has: its layers are this "
        + ("project's own; try: local")
    )
    dense = read_model_folder("model", latent)[0]
    assert dense is not None
    role = next(role for role in roles_of(config) if role.name == "actor")
    role.megatron.override_transformer_config.fp8, role.megatron.fp8_emulate = "e4m3", True
    (unlike,) = eight_bit_problems(role, replace(dense, num_experts=0), "cpu")
    assert str(unlike).startswith(f"{FP8}=e4m3 is not emulated for latent attention")
    config.actor_rollout_ref.model.path = centred = write_model(tmp_path / "centred", **GEMMA)
    (problem,) = found_with(config, "cuda", transformer_impl="transformer_engine", fp8=None)
    assert problem == (
        f"{IMPL}=transformer_engine has no norms whose weight w stands for 1 + w, which {centred} has; try: te_linear"
    )
    assert found_with(config, "cuda", transformer_impl="te_linear") == []


def test_experts_are_not_emulated(moe_config):
    """On GPUs attention alone is in 8 bits there. Would not catch experts that Megatron takes for dense layers."""
    (problem,) = found_with(moe_config, "cpu", True, fp8="e4m3")
    assert problem.startswith(f"{FP8}=e4m3 is not emulated for experts, which ")
    assert found_with(moe_config, "cuda", transformer_impl="te_linear") == []


def test_preflight_asks_for_every_role(config):
    """All roles follow the actor, and are named once. Would not catch a rule that another module forgets."""
    config.actor_rollout_ref.actor.megatron.override_transformer_config.transformer_impl = "te_linear"
    (problem,) = problems(config)
    assert problem.startswith(f"{IMPL}=te_linear needs trainer.device=cuda")


def test_who_computes_in_eight_bits_by_default(tmp_path: Path):
    """transformer-engine on GPUs; the reference rounds as the actor, a critic does not; bounds are wider."""
    file = tmp_path / "run.yaml"
    file.write_text("data: {train_files: a, val_files: b}\nactor_rollout_ref: {model: {path: m}}\n")
    reading = read_run(file, [f"{FP8}=e4m3", "trainer.device=cuda"])
    assert reading.config is not None and not reading.violations
    shared, critic = reading.config.actor_rollout_ref, reading.config.critic
    for role in (shared.actor, shared.ref):
        options = role.megatron.override_transformer_config
        assert (options.transformer_impl, options.fp8, options.fp8_recipe) == ("te_linear", "e4m3", "blockwise")
    options = critic.megatron.override_transformer_config
    assert (options.transformer_impl, options.fp8) == ("te_linear", None)
    assert (shared.rollout.logprob_diff_bound, shared.rollout.logprob_diff_mean_bound) == (1.0, 0.1)
    plain = read_run(file, ["trainer.device=cuda"]).config
    assert plain is not None
    assert plain.actor_rollout_ref.actor.megatron.override_transformer_config.transformer_impl == "local"


def test_the_plan_counts_weights_in_eight_bits(config):
    """By hand, of 6 layers of the model on TP2 x PP3: 2 layers with (384 x 12 x 32 twice, 384 x 6 x 32 twice, and three
    of 384 x 192) / 2 elements. On a GPU two bytes for the actor and one for the reference; emulated 4.
    """
    shared = config.actor_rollout_ref
    for role in (shared.actor, shared.ref):
        role.megatron.override_transformer_config.fp8 = "e4m3"
    elements = 2 * (2 * 384 * 384 + 2 * 384 * 192 + 3 * 384 * 192) // 2
    for device, actor, reference in (("cuda", 2, 1), ("cpu", 4, 4)):
        config.trainer.device = device
        models = RunModels(config)
        [pool] = models.pools.values()
        ledgers = {role.name: pool.ledger(role) for role in pool.spec.megatron_roles}
        assert ledgers["actor"].held(1).in_eight_bits == actor * elements
        assert ledgers["reference"].held(1).in_eight_bits == reference * elements
        assert ledgers["critic"].held(1).in_eight_bits == 0
