"""Runs whose own multi-token prediction layer guesses, and learns: resumed, repeated, and on pools of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from command_line import REPOSITORY
from safetensors.torch import load_file
from short_runs import LOCAL, MEGATRON, WITHOUT_RAY, metrics
from test_async_runs import ASYNC, SMALL, assert_same_bits, numbers

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

DEMO = REPOSITORY / "assets/demo"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = "configs/grpo_cpu.yaml"
SHORT = (
    *("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=4", f"{ROLLOUT}.n=4", "trainer.total_training_steps=4"),
    *("trainer.val_before_train=false", "trainer.test_freq=5040", "trainer.save_freq=2"),
)
LEARNS = (f"{ROLLOUT}.speculative=mtp", f"{ACTOR}.mtp_loss_scaling_factor=0.1", f"{ACTOR}.optim.lr=1e-3")
OPTIONS = f"{ACTOR}.megatron.override_transformer_config.moe_router"
FOLLOWED = (f"{OPTIONS}_enable_expert_bias=true", f"{OPTIONS}_bias_update_rate=1e-4")
FOLLOWED += tuple(f"actor_rollout_ref.ref.{key}" for key in ("sync_ref_model=true", "ref_model_sync_steps=1"))
ADAPTED = (
    "actor_rollout_ref.model.lora.rank=4",
    "actor_rollout_ref.model.lora.target_modules=[linear_qkv,linear_proj]",
)
TOKENS, LOSS = "rollout/tokens_per_step", "actor/mtp_loss"
OF_POLICY = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean")
EXPORT, PREFIX = "hf_model/model.safetensors", "model.layers.4."


def glm_with_mtp(folder: Path) -> str:
    """The setting of a GLM-4.5 with an MTP layer that guesses at random, and the demo's tokenizer."""
    from tiny_mtp import save_glm4_with_mtp

    return with_demo_tokenizer(partial(save_glm4_with_mtp, repeats=False), folder)


def with_demo_tokenizer(save: Callable[..., str], folder: Path) -> str:
    """The setting of a tiny model with the demo's tokens."""
    demo = json.loads((DEMO / "model/config.json").read_text())
    tokens = {key: demo[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    save(folder, **tokens)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(DEMO / "model" / name, folder / name)
    return f"actor_rollout_ref.model.path={folder}"


@pytest.mark.exhaustive
def test_a_layer_that_learns_goes_on(command_line, tmp_path: Path) -> None:
    """In one process: a run that goes on after step 2 has the metrics and the export of the one that did not stop. The
    layer's loss falls, and the export has the layer that was trained. A run without drafts draws the same answers, so
    its policy learns the same. Biases of experts move, and a reference follows them in each step.

    Would not catch a layer that learns badly: gradients are compared in tests/dist.
    """
    settings = (*SHORT, *LOCAL, *LEARNS, *FOLLOWED, glm_with_mtp(tmp_path / "model"))
    model = tmp_path / "model" / "model.safetensors"
    whole = command_line(*settings, config=GRPO)
    assert whole.wait() == 0, whole.text()
    saved = whole.run / "global_step_2"
    by_path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}")
    resumed = command_line(*settings, *by_path, config=GRPO)
    plain = command_line(*settings, f"{ROLLOUT}.speculative=null", f"{ACTOR}.mtp_loss_scaling_factor=0", config=GRPO)
    assert resumed.wait() == 0, resumed.text()
    assert plain.wait() == 0, plain.text()
    steps, again, without = metrics(whole), metrics(resumed), metrics(plain)
    assert numbers(resumed) == numbers(whole)[-2:]
    assert [again[step][LOSS] for step in (3, 4)] == [steps[step][LOSS] for step in (3, 4)]
    assert steps[4][LOSS] < steps[1][LOSS]
    assert all(step[TOKENS] >= 1 for step in steps.values())
    for step, expected in without.items():
        assert [steps[step][name] for name in OF_POLICY] == [expected[name] for name in OF_POLICY]
    exported, again_exported, of_plain, began = map(
        load_file, (*(run.run / EXPORT for run in (whole, resumed, plain)), model)
    )
    assert exported.keys() == again_exported.keys() == of_plain.keys() == began.keys()
    for name, tensor in exported.items():
        is_layers = name.startswith(PREFIX)
        assert torch.equal(tensor, again_exported[name])
        assert torch.equal(of_plain[name], began[name] if is_layers else tensor), name
        assert not (is_layers and name.endswith("proj.weight") and torch.equal(tensor, began[name])), name


@pytest.mark.exhaustive
def test_adapters_next_to_a_layer_that_drafts(command_line, tmp_path: Path) -> None:
    """Adapters learn the same with drafts and without, to the last bit of their folder, also resumed after step 2; the
    layer is exported as it was. Would not catch drafts that are always wrong.
    """
    settings = (*SHORT, *LOCAL, f"{ROLLOUT}.speculative=mtp", f"{ACTOR}.optim.lr=1e-2", *ADAPTED)
    settings += (glm_with_mtp(tmp_path / "model"),)
    whole = command_line(*settings, config=GRPO)
    assert whole.wait() == 0, whole.text()
    by_path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole.run / 'global_step_2'}")
    resumed = command_line(*settings, *by_path, config=GRPO)
    plain = command_line(*settings, f"{ROLLOUT}.speculative=null", config=GRPO)
    assert resumed.wait() == 0, resumed.text()
    assert plain.wait() == 0, plain.text()
    assert numbers(resumed) == numbers(whole)[-2:]
    steps, without = metrics(whole), metrics(plain)
    for step, expected in without.items():
        assert steps[step][TOKENS] >= 1
        assert [steps[step][name] for name in OF_POLICY] == [expected[name] for name in OF_POLICY]
    for file in (EXPORT, "adapter/adapter_model.safetensors"):
        exported, *others = (load_file(run.run / file) for run in (whole, resumed, plain))
        assert all(torch.equal(tensor, other[name]) for name, tensor in exported.items() for other in others)
    began = load_file(tmp_path / "model" / "model.safetensors")
    exported = load_file(whole.run / EXPORT)
    assert exported.keys() == began.keys()
    assert all(torch.equal(exported[name], began[name]) for name in began if name.startswith(PREFIX))
    assert any(not torch.equal(exported[name], tensor) for name, tensor in began.items())


@pytest.mark.exhaustive
def test_guesses_of_a_pool_of_its_own_are_repeated(command_line, tmp_path: Path) -> None:
    """A layer that learns on one pool and guesses on two replicas of another, a step ahead of training; the replay has
    its bits. Would not catch a layer that was transferred late: its guesses would be worse, and no answer other.
    """
    settings = (*SMALL, *LEARNS, WITHOUT_RAY, "trainer.rollout_ahead=1", "trainer.total_training_steps=4")
    settings += ("trainer.test_freq=5040", "trainer.val_before_train=false", "async_training.partial_rollout=false")
    settings += (glm_with_mtp(tmp_path / "model"), "actor_rollout_ref.rollout.n_gpus_per_node=2")
    run = command_line(*settings, config=ASYNC)
    assert run.wait() == 0, run.text()
    again = command_line(*settings, f"--replay={run.run}", config=ASYNC)
    assert again.wait() == 0, again.text()
    assert_same_bits(again, run)
    ours, theirs = metrics(again), metrics(run)
    assert [ours[step][TOKENS] for step in ours] == [theirs[step][TOKENS] for step in theirs]
    assert theirs[4][LOSS] < theirs[1][LOSS]


@pytest.mark.exhaustive
def test_two_stages_that_guess(command_line, tmp_path: Path) -> None:
    """TP2 and PP2 with sequence parallelism, generating on TP2: log-probs are the trainer's, and the layer learns."""
    layout = ("trainer.n_gpus_per_node=4", f"{MEGATRON}.pipeline_model_parallel_size=2", WITHOUT_RAY)
    keys = (f"{MEGATRON}.sequence_parallel=true", f"{ROLLOUT}.verify_weights_every=1")
    run = command_line(*SHORT, *LEARNS, *layout, *keys, glm_with_mtp(tmp_path / "model"), config=GRPO)
    assert run.wait() == 0, run.text()
    steps = metrics(run)
    assert all(step["training/rollout_logprob_diff_max"] < 5e-5 for step in steps.values())
    assert steps[4][LOSS] < steps[1][LOSS]


FP8 = (
    f"{ROLLOUT}.quantization=fp8",
    f"{ROLLOUT}.quantization_block_size=16",
    "algorithm.rollout_correction.rollout_is=token",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["latent attention, MTP", "gated delta", "wide heads"])
def test_fp8_rollouts_of_all_linears_run_two_steps(command_line, tmp_path: Path, family: str) -> None:
    """The plan accepts each, every transition is verified, and log-probs differ by the rounding alone.

    Of transformers' own Qwen3.5, rounded and not, log-probs of sampled tokens differ by 0.113 in the mean: its random
    weights are large. Would not catch a policy that learns worse.
    """
    from tiny_gemma4 import save_gemma4_with_keys_for_values
    from tiny_mtp import save_deepseek_with_mtp
    from tiny_qwen3_5 import save_qwen3_5

    wide = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    save, options = {
        "latent attention, MTP": (save_deepseek_with_mtp, LEARNS),
        "gated delta": (partial(save_qwen3_5, **wide), (f"{ROLLOUT}.logprob_diff_mean_bound=0.2",)),
        "wide heads": (save_gemma4_with_keys_for_values, ()),
    }[family]
    settings = (*SHORT, *LOCAL, *options, *FP8, with_demo_tokenizer(save, tmp_path / "model"))
    settings += (f"{ROLLOUT}.verify_weights_every=1",)
    run = command_line(*settings, "trainer.total_training_steps=2", config=GRPO)
    assert run.wait() == 0, run.text()
    steps = metrics(run)
    assert set(steps) >= {1, 2}
    assert all(0 < step["training/rollout_probs_diff_mean"] < 0.1 for step in (steps[1], steps[2])), steps
