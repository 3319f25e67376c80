"""Names that other programs and data sets have for the same thing: they are suggested before names of like spelling.

The table has the keys of TRL, OpenRLHF, prime-rl and slime with the key here, and where it differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.config.keys import ACTOR, CRITIC, KEYS, REF, ROLLOUT
from megatron_rl.config.problems import like_name

OPTIM, LORA, MODEL = f"{ACTOR}.optim", "actor_rollout_ref.model.lora", "actor_rollout_ref.model"
MEGATRON = f"{ACTOR}.megatron"
TRL, OPENRLHF, PRIME_RL, SLIME = "TRL", "OpenRLHF", "prime-rl", "slime"


@dataclass(frozen=True)
class OtherWord:
    """One meaning. key: here; None: there is none. note: what differs, so that a value cannot be taken over, or what to
    do instead. words: program -> its names. further: names that several programs or people have.
    """

    key: str | None
    note: str
    words: dict[str, tuple[str, ...]]
    further: tuple[str, ...] = ()

    @property
    def all_words(self) -> tuple[str, ...]:
        """Every name, without the program."""
        return (*(word for words in self.words.values() for word in words), *self.further)


def _row(
    key: str | None,
    trl: str = "",
    openrlhf: str = "",
    prime_rl: str = "",
    slime: str = "",
    further: str = "",
    note: str = "",
) -> OtherWord:
    named = {TRL: trl, OPENRLHF: openrlhf, PRIME_RL: prime_rl, SLIME: slime}
    words = {program: tuple(names.split()) for program, names in named.items() if names}
    return OtherWord(key, note, words, tuple(further.split()))


OTHER_WORDS = (
    # Batches and lengths
    _row(
        "data.train_batch_size",
        "generation_batch_size",
        "rollout_batch_size",
        "batch_size",
        "rollout_batch_size",
        note="counts prompts of a step, not responses: divide a number of responses by rollout.n",
    ),
    _row(
        f"{ACTOR}.ppo_mini_batch_size",
        "",
        "train_batch_size",
        "",
        "global_batch_size",
        note="counts prompts of an optimizer step, not responses: divide by rollout.n",
    ),
    _row(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        "per_device_train_batch_size",
        "micro_train_batch_size",
        "micro_batch_size",
        "micro_batch_size",
        note="responses of a forward and backward pass on a rank; it changes memory and speed, not what is learned",
    ),
    _row(
        f"{ACTOR}.ppo_mini_batch_size",
        "gradient_accumulation_steps",
        note="prompts of an optimizer step; accumulation follows from it and from ppo_micro_batch_size_per_gpu",
    ),
    _row(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", "per_device_eval_batch_size", "micro_rollout_batch_size"),
    _row(f"{ACTOR}.ppo_max_token_len_per_gpu", slime="max_tokens_per_gpu", note="with actor.use_dynamic_bsz=true"),
    _row(f"{ACTOR}.use_dynamic_bsz", slime="use_dynamic_batch_size"),
    _row(
        f"{ROLLOUT}.n",
        "num_generations",
        "n_samples_per_prompt",
        "rollouts_per_example group_size",
        "n_samples_per_prompt",
        "num_samples",
    ),
    _row(f"{ROLLOUT}.val_kwargs.n", "num_generations_eval", "", "", "n_samples_per_eval_prompt"),
    _row("data.max_prompt_length", "", "prompt_max_len", "", "rollout_max_prompt_len"),
    _row(
        "data.max_response_length",
        "max_completion_length",
        "generate_max_len max_new_tokens",
        "max_tokens max_completion_tokens",
        "rollout_max_response_len",
    ),
    _row("data.max_length", "max_length max_seq_length", "max_len", "seq_len", "", note="of sft, reward and dpo"),
    # Optimizer
    _row(f"{OPTIM}.lr", "learning_rate", "actor_learning_rate", "lr", "lr", "actor_lr policy_lr"),
    _row(f"{CRITIC}.optim.lr", "", "critic_learning_rate", "", "critic_lr"),
    _row(f"{OPTIM}.weight_decay", "weight_decay", "l2", "weight_decay", "weight_decay"),
    _row(f"{OPTIM}.clip_grad", "max_grad_norm", "max_norm", "max_norm", "clip_grad", "grad_clip gradient_clipping"),
    _row(
        f"{OPTIM}.betas",
        "adam_beta1 adam_beta2",
        "adam_betas",
        "betas1 betas2",
        "adam_beta1 adam_beta2",
        note="both: [0.9, 0.95]",
    ),
    _row(f"{OPTIM}.lr_decay_style", "lr_scheduler_type", "lr_scheduler", "", "lr_decay_style"),
    _row(f"{OPTIM}.lr_warmup_steps", "warmup_steps", "", "warmup_steps", "lr_warmup_iters", "num_warmup_steps"),
    _row(f"{OPTIM}.lr_warmup_steps_ratio", "warmup_ratio", "lr_warmup_ratio", "", "lr_warmup_fraction"),
    # Loss
    _row(f"{ACTOR}.clip_ratio", "epsilon", "eps_clip", "", "eps_clip", "cliprange"),
    _row(f"{ACTOR}.clip_ratio_low", "", "", "", "", "epsilon_low"),
    _row(f"{ACTOR}.clip_ratio_high", "epsilon_high", "eps_clip_high", "", "eps_clip_high"),
    _row(f"{ACTOR}.clip_ratio_c", "delta", "dual_clip", "", "eps_clip_c"),
    _row(f"{CRITIC}.cliprange_value", "cliprange_value", "value_clip", "", "value_clip"),
    _row(
        f"{ACTOR}.kl_loss_coef",
        "beta",
        "init_kl_coef",
        "",
        "kl_loss_coef",
        "kl_coef kl_coeff",
        note="with actor.use_kl_loss=true; of DPO dpo.beta; of KL in the reward algorithm.kl_ctrl.kl_coef",
    ),
    _row(f"{ACTOR}.kl_loss_type", "", "kl_estimator", "", "kl_loss_type", note="k1 is kl, k2 is mse, k3 is low_var_kl"),
    _row(f"{ACTOR}.entropy_coeff", "entropy_coef", "entropy_loss_coef", "", "entropy_coef"),
    _row(
        f"{ACTOR}.ppo_epochs",
        "num_iterations num_ppo_epochs",
        "max_epochs",
        "",
        "",
        note="passes over the responses of a step",
    ),
    _row(
        f"{ACTOR}.policy_loss.loss_mode",
        "importance_sampling_level",
        "policy_loss_type",
        "",
        "",
        note="vanilla is token level, gspo sequence level",
    ),
    _row(
        f"{ACTOR}.loss_agg_mode",
        "loss_type",
        "",
        "",
        "",
        note="grpo: seq-mean-token-mean, dapo, bnpo: token-mean, dr_grpo: seq-mean-token-sum-norm; of DPO dpo.loss",
    ),
    _row("algorithm.adv_estimator", "", "advantage_estimator", "", "advantage_estimator"),
    _row("algorithm.lam", "", "lambd", "", "lambd"),
    _row("algorithm.gamma", "gamma", "gamma", "", "gamma"),
    _row("algorithm.scale_rewards", "scale_rewards"),
    _row("algorithm.mask_truncated_completions", "mask_truncated_completions"),
    _row("algorithm.filter_groups.enable", "", "dynamic_filtering"),
    _row("algorithm.filter_groups.path", "", "", "", "dynamic_sampling_filter_path"),
    # Sampling
    _row(f"{ROLLOUT}.temperature", "temperature", "temperature", "temperature", "rollout_temperature"),
    _row(f"{ROLLOUT}.top_p", "top_p", "top_p", "top_p", "rollout_top_p"),
    _row(f"{ROLLOUT}.top_k", "top_k", "top_k", "top_k", "rollout_top_k", note="-1, not 0, means all tokens"),
    _row(
        f"{ROLLOUT}.tensor_model_parallel_size",
        "vllm_tensor_parallel_size",
        "vllm_tensor_parallel_size",
        "",
        "rollout_num_gpus_per_engine",
    ),
    _row(
        f"{ROLLOUT}.gpu_memory_utilization",
        "vllm_gpu_memory_utilization",
        "vllm_gpu_memory_utilization",
        "gpu_memory_utilization",
        "sglang_mem_fraction_static",
        note="training shares the GPU",
    ),
    _row("trainer.rollout_ahead", "", "", "async_level max_async_level", "", note="steps that generation may be ahead"),
    _row(
        f"{ROLLOUT}.over_sample_rate",
        "",
        "",
        "",
        "over_sampling_batch_size",
        note="a share of the groups, not a number",
    ),
    # Data
    _row(
        "data.train_files",
        "dataset_name",
        "prompt_data dataset",
        "",
        "prompt_data",
        note="a jsonl or parquet file: `hf download --repo-type dataset NAME`",
    ),
    _row("data.val_files", "eval_dataset", "eval_dataset", "", "eval_prompt_data"),
    _row("data.prompt_key", "", "input_key", "", "input_key"),
    _row("data.ground_truth_key", "", "label_key", "", "label_key", note="of kto the key of labels is data.label_key"),
    _row("data.prompt_as_chat", "", "apply_chat_template", "", "apply_chat_template"),
    _row("data.train_max_samples", "max_samples", "max_samples", "", "", "max_train_samples"),
    _row("data.text_key", "dataset_text_field"),
    _row("data.loss_on", "assistant_only_loss completion_only_loss", note="answers is the default"),
    _row("data.shuffle", "shuffle_dataset", "", "", "rollout_shuffle"),
    _row("data.seed", "data_seed", "", "", "rollout_seed"),
    # Models and adapters
    _row(
        "actor_rollout_ref.model.path",
        "model_name_or_path",
        "pretrain",
        "model_name",
        "hf_checkpoint",
        "model_id base_model",
    ),
    _row(
        "reward_model.model.path", "reward_model_path", "reward_pretrain", "", "", note="with reward_model.enable=true"
    ),
    _row(f"{LORA}.rank", "lora_r use_peft", "lora_rank", "rank", "", note="0 is off"),
    _row(f"{LORA}.alpha", "lora_alpha", "lora_alpha"),
    _row(f"{LORA}.target_modules", "lora_target_modules", "target_modules"),
    _row(f"{LORA}.dropout", "lora_dropout", "lora_dropout"),
    _row(f"{MEGATRON}.dtype", "bf16 fp16 torch_dtype", "bf16", "", "", note="bfloat16, float16 or float32"),
    _row(
        f"{MEGATRON}.override_transformer_config.recompute_granularity",
        "gradient_checkpointing",
        "gradient_checkpointing",
        "ac activation_checkpointing",
        "recompute_granularity",
        note="true is full; then recompute_method=uniform and recompute_num_layers=1",
    ),
    _row(f"{REF}.sync_ref_model", "sync_ref_model"),
    _row(f"{REF}.ref_model_sync_steps", "ref_model_sync_steps", "", "", "ref_update_interval"),
    _row(f"{REF}.ref_model_mixup_alpha", "ref_model_mixup_alpha"),
    _row(
        "custom_reward_function.path",
        "reward_funcs",
        "remote_rm_url",
        "",
        "custom_rm_path rm_type",
        note="a file with compute_score",
    ),
    _row("custom_reward_function.reward_kwargs", "reward_kwargs"),
    _row("custom_reward_function.per_group", "", "", "", "group_rm"),
    # DPO and SFT
    _row("dpo.loss", "dpo_loss_type"),
    _row("dpo.label_smoothing", "label_smoothing", "label_smoothing"),
    _row("dpo.reference", "precompute_ref_log_probs", note="stored, which computes them once, is the default"),
    # The run
    _row(
        "trainer.total_training_steps",
        "max_steps",
        "",
        "max_steps",
        "num_rollout",
        "num_steps train_steps",
        note="a step generates, scores and updates; optimizer steps are a multiple",
    ),
    _row("trainer.total_epochs", "num_train_epochs", "num_episodes", "", "num_epoch", "num_epochs epochs"),
    _row("trainer.default_local_dir", "output_dir", "save_path ckpt_path", "output_dir", "save"),
    _row("trainer.save_freq", "save_steps", "save_steps", "ckpt_interval", "save_interval"),
    _row("trainer.max_ckpt_to_keep", "save_total_limit", "max_ckpt_num", "keep keep_last", ""),
    _row("trainer.test_freq", "eval_steps", "eval_steps", "eval_interval", "eval_interval"),
    _row(
        "trainer.resume_from_path",
        "resume_from_checkpoint",
        "load_checkpoint",
        "resume_step",
        "load",
        note="the same command in the same folder resumes without it",
    ),
    _row(
        "trainer.logger",
        "report_to",
        "use_wandb use_tensorboard",
        "wandb",
        "use_wandb",
        note="a list, such as ['console', 'wandb']",
    ),
    _row("trainer.project_name", "project", "wandb_project", "", "wandb_project"),
    _row("trainer.experiment_name", "run_name", "wandb_run_name", "", "wandb_group"),
    _row("trainer.seed", "seed", "seed", "seed", "seed"),
    _row(
        "trainer.n_gpus_per_node",
        "",
        "actor_num_gpus_per_node",
        "",
        "actor_num_gpus_per_node",
        "gpus_per_node num_gpus",
    ),
    _row("trainer.nnodes", "", "actor_num_nodes", "", "actor_num_nodes", "num_nodes"),
    _row(
        "trainer.export_hf", "push_to_hub", note="the model is hf_model in the run's folder; upload it with `hf upload`"
    ),
    # Without a key
    _row(None, "logging_steps logging_strategy", "logging_steps", note="every step is logged: leave it out"),
    _row(None, "eval_strategy save_strategy", note="leave it out: trainer.test_freq and trainer.save_freq count steps"),
    _row(None, "use_vllm vllm_mode", "vllm_num_engines", note="vLLM always generates: leave it out"),
    _row(
        None,
        "deepspeed fsdp",
        "zero_stage adam_offload",
        "",
        "",
        note="Megatron trains: parallel sizes are in actor.megatron",
    ),
    _row(
        None,
        "packing padding_free",
        "packing_samples",
        "",
        "",
        note="sequences are laid end to end by default: leave it out",
    ),
    _row(None, "log_completions num_completions_to_print", note="leave it out: `megatron-rl view RUN` shows responses"),
    _row(
        None,
        "remove_unused_columns dataloader_num_workers",
        note="leave it out: columns that no key names are not read",
    ),
    _row(
        None,
        "load_in_4bit load_in_8bit",
        "load_in_4bit",
        note="weights are not quantized in training; LoRA needs the least memory",
    ),
    _row(
        None,
        "reward_weights",
        note="each reward model has reward_models.NAME.weight, the function reward_model.rule_weight",
    ),
    _row(
        None,
        "",
        "colocate_all_models",
        "",
        "colocate",
        note="training and generation share GPUs by default: leave it out",
    ),
)
"""Every meaning, each once: the first row with a word counts."""


FOLLOWERS = (CRITIC, REF, "reward_model")
"""Roles that have keys of the actor's names."""
WORDS: dict[str, OtherWord] = {}
"""The last part of a key of another program -> what it means."""
for _meaning in OTHER_WORDS:
    for _word in _meaning.all_words:
        WORDS.setdefault(_word, _meaning)
OWN_WORDS = frozenset(key.rpartition(".")[2] for key in KEYS)

PROMPTS = ("prompt", "question", "problem", "query", "instruction", "messages", "conversations", "input")
SOURCES = ("data_source", "source", "dataset", "dataset_name", "subset", "task")
TRUTHS = (
    *("ground_truth", "answer", "final_answer", "expected_answer", "solution", "target", "label", "gold", "output"),
    *("completion", "response"),
)
"""Names of columns with the prompt, with where a row is from, and with the expected answer, the surest first."""
ANSWERS = (
    *("answer", "answers", "solution", "solutions", "response", "responses", "completion", "output", "ground_truth"),
    *("label", "labels", "target", "gold", "chosen", "rejected", "reward_model", "final_answer", "expected_answer"),
)
"""Names of columns that nobody should be told to take for prompts."""


def meaning_of(key: str) -> OtherWord | None:
    """Return what a key of another program means; None for a key that none of them has.

    Programs write words with `-` on their command lines, and with `--` before.
    """
    return WORDS.get(key.rpartition(".")[2].lstrip("-").replace("-", "_"))


def suggested_key(key: str) -> str | None:
    """Return the key here that an unknown key means: by its word, or as a slip of spelling; None for neither.

    Where a critic or a reference is not named, the actor's key is meant.
    """
    group, _, word = key.rpartition(".")
    meaning, like = meaning_of(key), like_name(key, KEYS)
    if meaning is not None and not (group and like is not None and word in OWN_WORDS):
        return None if meaning.key is None else _within(group, meaning.key)
    role = next((role for role in FOLLOWERS if like is not None and like.startswith(f"{role}.")), None)
    if like is None or role is None or like_name(role.rpartition(".")[2], key.split(".")) is not None:
        return like
    rest = like.removeprefix(f"{role}.")
    return next((one for one in (f"{ACTOR}.{rest}", f"actor_rollout_ref.{rest}") if one in KEYS), like)


def _within(group: str, meant: str) -> str:
    """The key that is meant in a group that the user named: the critic's, where the critic is named."""
    of_group = f"{group}.{meant.rpartition('.')[2]}"
    return of_group if of_group in KEYS else meant


def key_note(key: str) -> str:
    """Return what another program's key means here where that differs, or what to do instead; "" for nothing."""
    meaning = meaning_of(key)
    return "" if meaning is None else meaning.note


def suggested_column(wanted: str, usual: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the column that is meant by one that a file does not have: one with a usual name, or a slip of spelling.

    A column whose name says that it holds responses is taken for nothing else. None where none is.
    """
    others = [name for name in names if name.lower() not in ANSWERS or name.lower() in usual]
    by_name = {name.lower(): name for name in others}
    return next((by_name[name] for name in usual if name in by_name), None) or like_name(wanted, others)
