"""The demo's own configuration in other layouts, by overrides alone, through the real command line."""

from __future__ import annotations

import json
import shutil

import pytest
from command_line import REPOSITORY
from short_runs import LOCAL, WITHOUT_RAY, metrics
from tiny_qwen3_5 import save_qwen3_5

pytestmark = [pytest.mark.dist, pytest.mark.timeout(480)]

DIFFERENCE = "training/rollout_logprob_diff_max"
MEGATRON = "actor_rollout_ref.actor.megatron"
ONE_PROCESS = ("--local", "--collapse")
SHORT = (
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=true",
)


@pytest.mark.exhaustive
def test_one_process_by_overrides(command_line) -> None:
    """Two steps with parity checks on. TP2xPP2, the demo's own, and TP4 to TP2 are in test_several_nodes.py; would not
    catch a layout that learns worse only later.
    """
    run = command_line(*SHORT, *LOCAL, validates_all=True)
    assert run.wait() == 0, run.text()
    folder = run.run
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["layout"] == {"world_size": 1, "tp": 1, "pp": 1, "cp": 1, "dp": 1, "rollout_tp": 1}
    assert summary["steps"] == 2
    assert 0 < summary["rollout_logprob_diff_max"] < 5e-5
    assert summary["hf_export_logit_diff_max"] < 1e-4
    assert summary["transition_bytes_received_per_rank"] == summary["transition_bytes_lower_bound_per_rank"]
    assert sum(summary["transition_bytes_received_per_rank"]) == 0
    # The same questions, the same greedy answers: what `transformers` scored at its making, but for ties.
    made = json.loads((REPOSITORY / "assets/demo/assets.json").read_text())
    assert summary["val_accuracy_before"] == pytest.approx(made["greedy_accuracy"], abs=0.003)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[1]["reshard/verify_s"] > 0
    assert (folder / "curves.png").stat().st_size > 10_000
    assert run.left_over() == []


@pytest.mark.exhaustive
@pytest.mark.timeout(950)
def test_context_parallelism_by_overrides(command_line) -> None:
    """PP2 x CP2 against one process, which also goes on from its first step: the same samples, losses and norms.

    Would not catch a difference below 1e-3 of a metric; tests/parity does.
    """
    layout = (f"{MEGATRON}.tensor_model_parallel_size=1", f"{MEGATRON}.pipeline_model_parallel_size=2")
    keys = (*SHORT, *layout, "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "trainer.save_freq=1")
    cut = command_line(*keys, WITHOUT_RAY, "trainer.n_gpus_per_node=4", f"{MEGATRON}.context_parallel_size=2")
    assert cut.wait() == 0, cut.text()
    summary = json.loads((cut.run / "summary.json").read_text())
    assert summary["layout"] == {"world_size": 4, "tp": 1, "cp": 2, "pp": 2, "dp": 1, "rollout_tp": 1}
    received = summary["transition_bytes_received_per_rank"]
    assert received == summary["transition_bytes_lower_bound_per_rank"] and sum(received) > 0
    whole = command_line(*keys, *ONE_PROCESS)
    resumed = command_line(
        *keys, *ONE_PROCESS, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={cut.run / 'global_step_1'}"
    )
    assert whole.wait() == 0, whole.text()
    assert resumed.wait() == 0, resumed.text()
    assert f"{MEGATRON}.context_parallel_size was 2, is 1" in resumed.text()
    theirs, ours, further = metrics(whole), metrics(cut), metrics(resumed)
    assert ours.keys() == theirs.keys() == {0, 1, 2} and further.keys() == {2}
    for run in (ours, further):
        for step, found in run.items():
            assert found.keys() == theirs[step].keys()
            # Rounding itself; it is bounded, not repeated.
            assert found.pop(DIFFERENCE, 0.0) < 5e-5
            for name in found:
                assert found[name] == pytest.approx(theirs[step][name], rel=1e-3, abs=1e-5), (step, name)
    assert [run.left_over() for run in (cut, whole, resumed)] == [[], [], []]


@pytest.mark.exhaustive
def test_the_demo_learns_in_bfloat16(command_line) -> None:
    """All of its steps in 16 bits in one process, with the default bounds on log-probs: 0.90 of held-out answers.

    That the bounds stop a wrong matrix is test_parity_bounds.py; layouts in 16 bits are in tests/parity. Would
    not catch how CUDA rounds.
    """
    run = command_line(*ONE_PROCESS, f"{MEGATRON}.dtype=bfloat16", "trainer.export_hf=false")
    assert run.wait(460) == 0, run.text()
    summary = json.loads((run.run / "summary.json").read_text())
    assert summary["val_accuracy_before"] < 0.5 and summary["val_accuracy_after"] >= 0.90
    # The types did round: float32 stays below 1e-4.
    assert summary["rollout_logprob_diff_max"] > 1e-3
    assert run.left_over() == []


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_the_demo_learns_in_eight_bits(command_line) -> None:
    """Actor and reference with emulated products in 8 bits, in one process, with the default bounds: 0.90 of held-out
    answers, as in bfloat16, and an export. Would not catch what a GPU's products do.
    """
    keys = (f"{MEGATRON}.override_transformer_config.fp8=e4m3", f"{MEGATRON}.fp8_emulate=true")
    run = command_line(*ONE_PROCESS, *keys)
    assert run.wait(460) == 0, run.text()
    summary = json.loads((run.run / "summary.json").read_text())
    assert summary["fp8_emulated"] == ["actor", "reference"]
    assert summary["val_accuracy_before"] < 0.5 and summary["val_accuracy_after"] >= 0.90
    # The types did round, and the exported model's logits are those of weights in 32 bits.
    assert summary["rollout_logprob_diff_max"] > 1e-2 and summary["hf_export_logit_diff_max"] > 1e-2
    assert run.left_over() == []


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_the_demo_learns_with_rollouts_in_eight_bits(command_line) -> None:
    """All of its steps on TP2 x PP2 with codes of 8 bits, importance weights and the default bounds: 0.95 of held-out
    answers. Would not catch a larger model that loses what this one does not.
    """
    rollout = "actor_rollout_ref.rollout.quantization"
    keys = (f"{rollout}=fp8", f"{rollout}_block_size=32", "algorithm.rollout_correction.rollout_is=token")
    run = command_line(WITHOUT_RAY, *keys, "trainer.n_gpus_per_node=4")
    assert run.wait(460) == 0, run.text()
    summary = json.loads((run.run / "summary.json").read_text())
    assert summary["val_accuracy_before"] < 0.5 and summary["val_accuracy_after"] >= 0.95
    received = summary["transition_bytes_received_per_rank"]
    assert received == summary["transition_bytes_lower_bound_per_rank"] and min(received) > 0
    # The codes did round, and the export has what was trained.
    assert summary["rollout_logprob_diff_max"] > 1e-2 and summary["hf_export_logit_diff_max"] < 1e-4
    assert run.left_over() == []


TWO = (
    f"{MEGATRON}.tensor_model_parallel_size=1",
    f"{MEGATRON}.pipeline_model_parallel_size=1",
    "trainer.n_gpus_per_node=2",
)
BY_TOKENS = ("actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "keys",
    [
        ("actor_rollout_ref.actor.use_remove_padding=true",),
        (*BY_TOKENS, f"{MEGATRON}.dynamic_context_parallel=true"),
        ("actor_rollout_ref.model.lora.rank=4",),
    ],
    ids=["packed", "dynamic", "adapters"],
)
def test_delta_layers_over_two_ranks(command_line, tmp_path, keys) -> None:
    """Qwen3.5's layers with states, whose ranks exchange tokens for heads: two steps, and log-probs as vLLM has them.

    Would not catch an error that training and generation share; the rows of tests/parity would.
    """
    demo = json.loads((REPOSITORY / "assets/demo/model/config.json").read_text())
    tokens = {key: demo[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    model = save_qwen3_5(tmp_path / "model", linear_num_key_heads=4, linear_num_value_heads=8, **tokens)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(REPOSITORY / "assets/demo/model" / name, model)
    sizes = (*TWO, f"{MEGATRON}.context_parallel_size=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")
    run = command_line(*SHORT[:-1], *sizes, WITHOUT_RAY, f"actor_rollout_ref.model.path={model}", *keys)
    assert run.wait() == 0, run.text()
    summary = json.loads((run.run / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["layout"]["cp"] == 2
    assert 0 < summary["rollout_logprob_diff_max"] < 5e-4
