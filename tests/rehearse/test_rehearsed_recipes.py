"""`megatron-rl rehearse`, as typed: ranks of the 70B recipe on GPUs that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from sweeps import WEEKLY, marks_of
from vision_folders import save_qwen3_vl_folder

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.cluster.stale_processes import living
from megatron_rl.config.load import load_config
from megatron_rl.config.roles import Placement

REPOSITORY = Path(__file__).parents[2]
RECIPE = "configs/llama3_70b_ppo.yaml"
PLACES = "configs/known/llama3_70b_ppo.txt"
"""Host waits and groups of ranks 0 and 63, accepted."""
GPU_RECIPES = {
    "configs/llama3_70b_ppo.yaml": "ppo",
    "configs/qwen3_235b_a22b_gspo.yaml": "ppo",
    "configs/recipes/deepseek_v3_grpo.yaml": "ppo",
    "configs/recipes/gpt_oss_20b_grpo.yaml": "ppo",
    "configs/recipes/kimi_k2_grpo.yaml": "ppo",
    "configs/recipes/llama3_70b_distill.yaml": "ppo",
    "configs/recipes/llama3_70b_lora_grpo.yaml": "ppo",
    "configs/recipes/llama3_8b_grpo.yaml": "ppo",
    "configs/recipes/llama3_8b_ppo.yaml": "ppo",
    "configs/recipes/qwen2.5_7b_grpo.yaml": "ppo",
    "configs/recipes/qwen2.5_7b_lora_grpo.yaml": "ppo",
    "configs/recipes/qwen2.5_7b_ppo.yaml": "ppo",
    "configs/recipes/qwen3.5_35b_a3b_geo3k_grpo.yaml": "ppo",
    "configs/recipes/qwen3.5_35b_a3b_grpo.yaml": "ppo",
    "configs/recipes/qwen3_30b_a3b_128k_grpo.yaml": "ppo",
    "configs/recipes/qwen3_30b_a3b_grpo.yaml": "ppo",
    "configs/recipes/qwen3_32b_grpo.yaml": "ppo",
    "configs/recipes/qwen3_vl_8b_geo3k_grpo.yaml": "ppo",
    "configs/stages/llama3_70b_dpo.yaml": "dpo",
    "configs/stages/llama3_70b_sft.yaml": "sft",
    "configs/stages/llama3_8b_reward.yaml": "reward",
    "configs/stages/qwen3_30b_a3b_sft.yaml": "sft",
}
"""Every configuration for GPUs, and its task."""

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]


def rehearse(out, *options, config=RECIPE):
    command = [sys.executable, "-m", "megatron_rl", "rehearse", "--config", config, "--out", str(out), *options]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def waits_of_each_block(found, phase):
    """Waits that come once or more for every micro-batch of a phase."""
    num_blocks = found["num_blocks"][phase]
    return sum(count // num_blocks for count in found["waits"][phase].values())


def report(out, number):
    return json.loads((out / f"rank{number}.json").read_text())


def test_a_rank_of_the_70b_recipe(tmp_path):
    """Code 0, owned bytes equal to the plan's, peaks within 2%, and no forward pass that reads the device.

    The last stage has the head and the losses. Would not catch what only other stages do.
    """
    answer = rehearse(tmp_path, "--ranks", "63", "--layers", "1", "--jobs", "1", "--json", "--known", PLACES)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    said = json.loads(answer.stdout)
    assert (said["fits"], said["ranks"], said["faults"]) == (True, [63], [])
    assert {peak["phase"] for peak in said["peaks"]} >= {"init", "update_actor"}
    found = report(tmp_path, 63)
    owned = found["phases"]["update_critic"]["owned"]
    # One layer of the last stage, over TP8, with a head of 128,256 x 8192 and the last norm.
    layer = (8192 * (8192 + 2048) + 8192 * 8192 + 3 * 8192 * 28672) // 8 + 2 * 8192
    head = 128256 * 8192 // 8
    actor = 2 * (layer + head + 8192)
    assert owned["actor parameters"] == pytest.approx(actor, rel=1e-4)
    assert owned["reference parameters"] == actor
    assert owned["actor gradients"] == 2 * owned["actor parameters"]
    assert owned["actor moments"] == pytest.approx(owned["actor gradients"], rel=1e-4)  # 8 bytes, over two replicas
    scored = {"old_log_prob", "ref", "values", "update_actor", "update_critic"}
    assert scored | {"init", "reshard", "save"} == set(found["phases"])
    # Actor and critic, and what all ranks agree on: tensors, their files, and at the end what was written.
    saving = [call["name"] for call in found["calls"] if call["phase"] == "save"]
    assert saving.count("all_gather_object") == 2 and saving.count("gather_object") == 4
    # Entering rollout mode brings the layers of three other stages and the embedding, from the ranks that have them.
    entering = [call for call in found["calls"] if call["phase"] == "reshard" and call["name"] == "recv"]
    received = sum(call["sizes"][0]["numel"] for call in entering)
    assert received == 3 * layer + 128256 * 8192 // 8
    assert {call["peer"] for call in entering} <= {rank for rank in range(63) if rank % 16 >= 8}  # its exchange group
    scores = [call for call in found["calls"] if call["phase"] == "old_log_prob"]
    assert {"recv", "allgather_base", "reduce_scatter_base"} <= {call["name"] for call in scores}
    assert all(call["peer"] == 47 for call in scores if call["name"] == "recv")  # the same rank one stage before
    assert waits_of_each_block(found, "update_actor") <= 3 and waits_of_each_block(found, "first update_actor") <= 3
    assert waits_of_each_block(found, "old_log_prob") == 0
    assert said["calls"] == len(found["calls"])


def test_waits_of_experts(tmp_path):
    """One wait a layer of experts and forward pass: Megatron reads how many tokens go where. Two layers, two blocks.

    Would not catch a wait inside a kernel.
    """
    recipe = "configs/recipes/qwen3_30b_a3b_grpo.yaml"
    answer = rehearse(tmp_path, "--ranks", "0", "--layers", "2", "--jobs", "1", config=recipe)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = report(tmp_path, 0)
    for phase in ("old_log_prob", "ref", "update_actor"):
        waits = {text: count for text, count in found["waits"][phase].items() if text.startswith("event")}
        assert sum(waits.values()) == 2 * found["num_blocks"][phase]
        assert waits_of_each_block(found, phase) <= 2 + 1  # and counts of experts, once an update


@pytest.mark.parametrize(
    "way", ["p2p", pytest.param("all_gather", marks=WEEKLY), pytest.param("a2a", marks=pytest.mark.exhaustive)]
)
def test_no_waits_of_context_parallel_attention(tmp_path, way):
    """Two ranks share every sequence: none of their micro-batches is waited for, forward or in an update.

    Would not catch a wait of attention without kernels, which float32 has.
    """
    megatron = "actor_rollout_ref.actor.megatron"
    options = [f"{megatron}.context_parallel_size=2", f"{megatron}.override_transformer_config.cp_comm_type={way}"]
    recipe = "configs/recipes/llama3_8b_grpo.yaml"
    answer = rehearse(tmp_path, "--ranks", "0", "--layers", "1", "--jobs", "1", *options, config=recipe)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = report(tmp_path, 0)
    exchanged = {"p2p": {"send", "recv"}, "all_gather": {"allgather_base"}, "a2a": {"alltoall_base"}}[way]
    for phase in ("old_log_prob", "ref", "update_actor"):
        assert found["num_blocks"][phase] > 1
        assert waits_of_each_block(found, phase) == 0, found["waits"][phase]
        of_keys = [call for call in found["calls"] if call["line"].startswith("model/key_exchange.py")]
        assert exchanged <= {call["name"] for call in of_keys if call["phase"] == phase}


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_passes_of_two_groups_leave_nothing(tmp_path):
    """Ranks of both groups, and of both halves of one, that choose who shares a pass: calls fit, all step alike, and
    while a rank generates no memory is left that a pass made: of experts, rotary angles and gathered sequences. Waits
    have their ceiling.

    Would not catch what layers other than the first leave.
    """
    recipe, actor = "configs/recipes/qwen3_30b_a3b_128k_grpo.yaml", "actor_rollout_ref.actor"
    sizes = [f"{actor}.megatron.context_parallel_size=4", f"{actor}.ppo_max_token_len_per_gpu=32768"]
    answer = rehearse(tmp_path, "--ranks", "0,12,31", "--layers", "1", *sizes, config=recipe)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    for number in (0, 12, 31):
        found = report(tmp_path, number)
        owned = found["phases"]["update_actor"]["owned"]
        assert (
            owned["actor moments"] == pytest.approx(2 * owned["actor masters"], rel=1e-6) and owned["actor moments"] > 0
        )
        weights = sum(
            size
            for line, size in found["at_peak"]["reshard"].items()
            if line.startswith(("roles/training.py:104", "hybrid_engine/stable_memory.py"))
        )
        assert weights > 0.99 * found["phases"]["reshard"]["peak"]
        # As without context parallelism: one a layer of experts and forward pass, and counts of experts.
        assert waits_of_each_block(found, "old_log_prob") == 1
        assert waits_of_each_block(found, "update_actor") <= 2 + 1


YARN = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0}
KIMI = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "hidden_size": 896,
    "intermediate_size": 2304,
    "moe_intermediate_size": 256,
    "n_routed_experts": 48,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "q_lora_rank": 192,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 131072,
    "vocab_size": 20480,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_theta": 50000.0,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
"""Kimi-K2 with an eighth of its width and two layers, a dense one and one of experts."""
NARROW_GPT_OSS = {"hidden_size": 720, "intermediate_size": 720, "num_attention_heads": 8, "num_key_value_heads": 2}
NARROW_QWEN3_5 = {
    "hidden_size": 512,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_experts": 32,
    "num_attention_heads": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "full_attention_interval": 2,
}
SHORT = {"num_hidden_layers": 2, "vocab_size": 20480, "eos_token_id": 2, "pad_token_id": 1}
LONG_SHAPES = {
    "kimi-k2": lambda: KIMI,
    "gpt-oss": lambda: ModelFolder(f"{REPOSITORY}/configs/models/gpt-oss-20b").content | NARROW_GPT_OSS | SHORT,
    "qwen3.5": lambda: {
        **(whole := ModelFolder(f"{REPOSITORY}/configs/models/qwen3.5-35b-a3b").content),
        "text_config": whole["text_config"] | NARROW_QWEN3_5 | SHORT,
    },
}
"""Name -> config.json of a narrow model of two layers, one of each kind."""


def long_case(shape, num_tokens, *keys):
    """A case of `test_long_sequences`; 131,072 tokens take minutes."""
    marks = (pytest.mark.exhaustive, pytest.mark.weekly) if num_tokens > 10_000 else (pytest.mark.exhaustive,)
    return pytest.param(shape, num_tokens, keys, marks=marks)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("shape", "num_tokens", "keys"),
    [
        long_case("qwen3.5", 8192, "context_parallel_size=2", "tensor_model_parallel_size=2", "sequence_parallel=true"),
        *(long_case(shape, 131072, "context_parallel_size=4") for shape in LONG_SHAPES),
        long_case("kimi-k2", 131072, "context_parallel_size=4", "expert_model_parallel_size=4"),
    ],
)
def test_long_sequences(tmp_path, shape, num_tokens, keys):
    """Sequences that ranks share: peaks of all passes within 10% of the plan, both ways, without weights too.

    Would not catch what a wider model holds otherwise.
    """
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(LONG_SHAPES[shape]()))
    actor, rollout, size = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", int(keys[0].split("=")[1])
    one = {"tensor_model_parallel_size": 1, "sequence_parallel": False, "expert_model_parallel_size": 1}
    layout = one | {"dynamic_context_parallel": False} | dict(key.split("=") for key in keys)
    options = (
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        *("trainer.nnodes=1", "trainer.n_gpus_per_node=4", f"data.max_response_length={num_tokens - 4096}"),
        f"{rollout}.tensor_model_parallel_size={layout['tensor_model_parallel_size']}",
        f"{actor}.ppo_max_token_len_per_gpu={num_tokens // size}",
        f"{actor}.megatron.override_transformer_config.recompute_granularity=null",
        f"{actor}.megatron.override_transformer_config.recompute_method=null",
        f"{actor}.megatron.override_transformer_config.recompute_num_layers=null",
        *(f"{actor}.megatron.{key}={str(value).lower()}" for key, value in layout.items()),
    )
    recipe = "configs/recipes/qwen3_30b_a3b_128k_grpo.yaml"
    answer = rehearse(tmp_path / "out", "--ranks", "0", "--jobs", "1", "--json", *options, config=recipe)
    peaks = {peak["phase"]: (peak["rehearsed"], peak["planned"]) for peak in json.loads(answer.stdout)["peaks"]}
    for phase in ("old_log_prob", "ref", "update_actor"):
        weights = sum(report(tmp_path / "out", 0)["phases"][phase]["owned"].values())
        rehearsed, planned = (size - weights for size in peaks[phase])
        assert rehearsed == pytest.approx(planned, rel=0.1), phase


SPLIT = ("pools={rollout: {nnodes: 1, n_gpus_per_node: 8}}", "actor_rollout_ref.rollout.pool=rollout")
"""Overrides of a recipe on one node: generation has a node of its own."""


def test_weights_for_another_pool(tmp_path):
    """Ranks of both pools: messages fit, and a rollout rank gets its shard, by hand: one layer of 7B over TP2.

    Would not catch a message of a rank that is not rehearsed.
    """
    recipe = "configs/recipes/qwen2.5_7b_grpo.yaml"
    answer = rehearse(tmp_path, "--ranks", "0,1,8,9", "--layers", "1", *SPLIT, config=recipe)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "of 4 ranks fit together, as far as they meet: 16 in all" in answer.stdout
    messages = [
        call
        for number in (0, 1, 8, 9)
        for call in report(tmp_path, number)["calls"]
        if call["phase"] == "reshard" and call["name"] in ("send", "recv") and {7, 8} < set(call["group"])
    ]
    assert all(call["group"] == list(range(16)) for call in messages)
    sent = [call["peer"] for call in report(tmp_path, 0)["calls"] if call["phase"] == "reshard" and call["peer"]]
    assert sent and min(sent) >= 8  # all of it goes to the other pool
    hidden, inner, heads, kv, vocab = 3584, 18944, 28 * 128, 4 * 128, 152064
    layer = (hidden * (heads + 2 * kv) + heads + 2 * kv + heads * hidden + 3 * hidden * inner) // 2 + 2 * hidden
    shard = layer + 2 * vocab * hidden // 2 + hidden
    received = [call for call in report(tmp_path, 8)["calls"] if call in messages and call["name"] == "recv"]
    assert sum(call["sizes"][0]["numel"] for call in received) == shard
    assert report(tmp_path, 8)["phases"]["reshard"]["peak"] == pytest.approx(2 * shard, rel=0.05)


def test_all_recipes_are_rehearsed():
    """Every file under configs/ that does not run on CPUs. Would not catch a recipe elsewhere."""
    files = {str(file.relative_to(REPOSITORY)) for file in (REPOSITORY / "configs").rglob("*.yaml")}
    ablations = {"configs/ablation.yaml", *map(str, Path("configs/ablations").glob("*.yaml"))}
    assert {file for file in files if "device: cpu" not in (REPOSITORY / file).read_text()} - ablations == set(
        GPU_RECIPES
    )


OFTEN = (
    "configs/llama3_70b_ppo.yaml",
    "configs/recipes/llama3_70b_lora_grpo.yaml",
    "configs/recipes/qwen3_30b_a3b_grpo.yaml",
    "configs/stages/llama3_70b_dpo.yaml",
)
"""PPO with a critic, adapters, experts, a task without generation: of the sweeps; the others are weekly."""


RARELY = GPU_RECIPES.keys() - set(OFTEN)
WITH_PLACES = {f"configs/recipes/{name}.yaml" for name in ("llama3_8b_grpo", "qwen2.5_7b_grpo", "qwen2.5_7b_ppo")}
"""Recipes with a list of accepted places of these ranks and layers."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("recipe", "stage"), [pytest.param(*case, marks=marks_of(case[0], weekly=RARELY)) for case in GPU_RECIPES.items()]
)
def test_every_recipe(tmp_path, recipe, stage):
    """First, middle and last rank with two layers a stage: peaks within 2% of the plan, calls fit, and no wait or
    group is new where a list of them was accepted.

    Would not catch a layer kind that the first layers do not have.
    """
    world = Placement.of(load_config(recipe)).world_size
    ranks = ",".join(map(str, sorted({0, world // 2, world - 1})))
    known = ("--known", f"configs/known/{Path(recipe).stem}.txt") if recipe in WITH_PLACES else ()
    answer = rehearse(tmp_path, "--ranks", ranks, "--layers", "2", "--stage", stage, *known, config=recipe)
    assert answer.returncode == 0, answer.stdout + answer.stderr


TEACHER, LOSS = "distillation.teacher_models.expert", "distillation.distillation_loss"
LIKE_IT = (f"{TEACHER}.model_path=configs/models/llama-3-8b", f"{TEACHER}.megatron.param_offload=true")
ITSELF = (f"{TEACHER}.model_path=self", f"{TEACHER}.prompt_key=hint", "actor_rollout_ref.actor.ppo_mini_batch_size=256")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mode", "teacher"),
    [
        *(pytest.param(mode, LIKE_IT, marks=WEEKLY) for mode in ("k2", "forward_kl_topk", "reverse_kl_topk")),
        ("jsd", LIKE_IT),
        pytest.param("jsd", ITSELF, marks=WEEKLY),
    ],
)
def test_ranks_with_a_teacher(tmp_path, mode, teacher):
    """In the actor's pool: peaks within 2%, a copy for each micro-batch that makes many numbers a token, and no head
    and no teacher on the device while it generates.

    Would not catch how long a copy takes.
    """
    options = ("distillation.enabled=true", f"{LOSS}.loss_mode={mode}", f"{LOSS}.use_policy_gradient=false")
    recipe = "configs/recipes/llama3_8b_grpo.yaml"
    answer = rehearse(tmp_path, "--ranks", "0", "--layers", "1", "--jobs", "1", *options, *teacher, config=recipe)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = report(tmp_path, 0)
    assert waits_of_each_block(found, "teacher_expert") <= 2 and found["num_blocks"]["teacher_expert"] > 1
    owned = {phase: found["phases"][phase]["owned"] for phase in ("update_actor", "reshard")}
    has_head = mode == "jsd" and teacher == LIKE_IT
    assert owned["update_actor"].get("expert head", 0) == has_head * 128256 // 2 * 4096 * 2
    assert not any(size for name, size in owned["reshard"].items() if name.startswith("expert"))


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_ranks_of_the_70b_recipe_with_all_layers(tmp_path):
    """First, middle and last: every peak within 2% of the plan. Would not catch a rank that differs in its stage."""
    answer = rehearse(tmp_path, "--ranks", "0,20,63")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert [report(tmp_path, number)["pp_rank"] for number in (0, 20, 63)] == [0, 1, 3]


def test_a_failing_rank_is_named(tmp_path):
    """A loss that raises: code 1 with its traceback. Would not catch a rank that is killed without a word."""
    loss = tmp_path / "loss.py"
    loss.write_text("def mine(tokens, config):\n    raise ValueError('no such luck')\n")
    mine = [
        f"actor_rollout_ref.actor.policy_loss.custom.path={loss}",
        "actor_rollout_ref.actor.policy_loss.loss_mode=mine",
    ]
    answer = rehearse(tmp_path / "out", "--ranks", "63", "--layers", "1", *mine)
    assert answer.returncode == 1
    assert "rank 63 could not be rehearsed" in answer.stderr and "no such luck" in answer.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout",
    [(), pytest.param(("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",), marks=pytest.mark.weekly)],
)
def test_all_ranks_of_two_pools(tmp_path, layout):
    """Training of one stage and of two: every message of a transfer has its other side. Would not catch its content."""
    recipe = "configs/recipes/qwen2.5_7b_grpo.yaml"
    answer = rehearse(tmp_path, "--ranks", "all", "--layers", "1", *SPLIT, *layout, config=recipe)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert " of 16 ranks fit together\n" in answer.stdout
    sent, received = (
        sum(
            call["sizes"][0]["numel"]
            for number in range(16)
            for call in report(tmp_path, number)["calls"]
            if (call["phase"], call["name"]) == ("reshard", name)
        )
        for name in ("send", "recv")
    )
    assert sent == received > 0


@pytest.mark.exhaustive
@pytest.mark.weekly
@pytest.mark.timeout(3600)
def test_all_ranks_of_the_70b_recipe(tmp_path):
    """64 ranks with two layers a stage: peaks are planned and every call has its other sides. Would not catch other
    layers.
    """
    answer = rehearse(tmp_path, "--ranks", "all", "--layers", "2")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert " of 64 ranks fit together\n" in answer.stdout


@pytest.mark.exhaustive
def test_a_model_of_few_tokens(tmp_path):
    """The split demo, whose model has a few dozen tokens: no made-up token lies beyond. Would not catch wrong sizes."""
    answer = rehearse(tmp_path, "--ranks", "all", config="configs/split_cpu.yaml")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "of 6 ranks fit together" in answer.stdout


TRAINED_TOWER = "actor_rollout_ref.actor.megatron.freeze_vision_model=false"
FEW = ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=4")


@pytest.mark.exhaustive
def test_a_tower_that_is_trained(tmp_path):
    """Two stages, of which the first has it, next to a reference that reads the folder's: calls fit, peaks are planned.

    Would not catch its sizes.
    """
    model = save_qwen3_vl_folder(tmp_path / "model")
    options = (TRAINED_TOWER, "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2")
    options += (f"actor_rollout_ref.model.path={model}", "data.image_key=images", "data.max_prompt_length=64")
    options += FEW
    answer = rehearse(tmp_path / "out", "--ranks", "all", *options, config="configs/grpo_cpu.yaml")
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("recipe", "ranks"),
    [
        pytest.param("qwen3_vl_8b_geo3k_grpo", "0,4,7", marks=WEEKLY),
        pytest.param("qwen3.5_35b_a3b_geo3k_grpo", "0,8,15", marks=WEEKLY),
    ],
)
def test_a_recipe_whose_tower_is_trained(tmp_path, recipe, ranks):
    """As of every recipe, of fewer images, each of which is a pass of the tower. Would not catch seconds."""
    recipe = f"configs/recipes/{recipe}.yaml"
    answer = rehearse(tmp_path, "--ranks", ranks, "--layers", "2", TRAINED_TOWER, *FEW, config=recipe)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("reached", ["fake_cuda", "megatron_rl.rehearse.child"])
def test_a_signal_leaves_neither_files_nor_processes(tmp_path, reached):
    """SIGTERM while g++ runs, and while ranks do. Would not catch SIGKILL, after which the folder is left."""
    command = [sys.executable, "-m", "megatron_rl", "rehearse", "--config", RECIPE, "--out", str(tmp_path / "out")]
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path / "tmp")}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL)
    family: list[psutil.Process] = []
    while not any(reached in " ".join(quiet_line(each)) for each in family):
        assert process.poll() is None
        family = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 143 and not living(family) and [*(tmp_path / "tmp").iterdir()] == []


def quiet_line(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []
