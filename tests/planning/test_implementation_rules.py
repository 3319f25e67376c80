"""Who computes linear layers, and in how many bits: what is refused before anything starts, word for word."""

from __future__ import annotations

from pathlib import Path

from model_folders import problems, write_model
from test_gated_delta_rules import QWEN3_5
from test_model_folder import GEMMA, LATENT
from test_sinks_and_stacks import SINKS

from megatron_rl.config.load import read_run
from megatron_rl.planning.preflight import preflight
from megatron_rl.planning.run_models import RunModels

MEGATRON = "actor_rollout_ref.actor.megatron"
GROUP = f"{MEGATRON}.override_transformer_config"
IMPL, FP8, EMULATE = f"{GROUP}.transformer_impl", f"{GROUP}.fp8", f"{MEGATRON}.fp8_emulate"


def test_models_that_transformer_engine_computes(config, tmp_path):
    """Norms of 1 + w, latent attention and a bias of the output have no complaint; adapters read a norm's output, so
    that te_linear is offered. Would not catch what only a GPU's layers lack.
    """
    options = config.actor_rollout_ref.actor.megatron.override_transformer_config
    config.trainer.device = "cuda"
    for number, changes in enumerate((GEMMA, LATENT, SINKS)):
        config.actor_rollout_ref.model.path = write_model(tmp_path / str(number), **changes)
        for options.transformer_impl in ("transformer_engine", "te_linear"):
            assert not [text for text in problems(config) if IMPL in text]
    config.actor_rollout_ref.model.path = write_model(tmp_path / "plain")
    config.actor_rollout_ref.model.lora.rank = 8
    options.transformer_impl = "transformer_engine"
    (problem,) = [text for text in problems(config) if IMPL in text]
    assert "lora.rank=8 do not go together: adapters read the norm's output" in problem
    assert f"; try: {IMPL}=te_linear" in problem
    options.transformer_impl = "te_linear"
    assert not [text for text in problems(config) if IMPL in text]


def test_who_may_have_fused_kernels(config, tmp_path):
    """Sinks on GPUs in 16 bits; not on CPUs, in float32, or where ranks share sequences, of which windows alone do not
    care. The rule of gated deltas needs its package. Would not catch a package without a kernel.
    """
    actor, key = config.actor_rollout_ref.actor.megatron, f"{MEGATRON}.attention_kernels"
    actor.attention_kernels = "fused"
    for device, dtype, size, changes, why in (
        ("cuda", "bfloat16", 1, SINKS, ""),
        ("cpu", "bfloat16", 1, SINKS, "these kernels compute gradients on GPUs alone; try: "),
        ("cuda", "float32", 1, SINKS, "they round products of float32 to fewer digits; try: "),
        ("cuda", "bfloat16", 2, SINKS, "with context parallelism, attention meets keys block by block"),
        ("cuda", "bfloat16", 2, GEMMA, ""),
    ):
        config.trainer.device, actor.dtype, actor.context_parallel_size = device, dtype, size
        folder = f"{device}-{dtype}-{size}-{changes['architectures'][0]}"
        config.actor_rollout_ref.model.path = write_model(tmp_path / folder, **changes)
        about = [text for text in problems(config) if key in text]
        assert (why in about[0] and len(about) == 1) if why else not about, about
    actor.context_parallel_size = 1
    config.actor_rollout_ref.model.path = write_model(tmp_path / "delta", **QWEN3_5)
    (about,) = [text for text in problems(config) if key in text]
    assert about.endswith("not installed: pip install flash-linear-attention; try: plain")
    assert not [one for one in preflight(config, config_only=True) if key in one.settings]


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
