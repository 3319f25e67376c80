"""Names that other programs and data sets have for the same thing: they are suggested before names of like spelling."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.config.keys import ACTOR, CRITIC, KEYS, REF, ROLLOUT
from megatron_rl.config.problems import like_name

FOLLOWERS = (CRITIC, REF, "reward_model")
"""Roles that have keys of the actor's names."""
OPTIM, LORA = f"{ACTOR}.optim", "actor_rollout_ref.model.lora"
OTHER_WORDS = {
    **dict.fromkeys(("learning_rate", "actor_lr", "policy_lr"), f"{OPTIM}.lr"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clipping"), f"{OPTIM}.clip_grad"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), f"{OPTIM}.lr_decay_style"),
    **dict.fromkeys(("warmup_steps", "num_warmup_steps"), f"{OPTIM}.lr_warmup_steps"),
    "warmup_ratio": f"{OPTIM}.lr_warmup_steps_ratio",
    **dict.fromkeys(("epsilon", "cliprange"), f"{ACTOR}.clip_ratio"),
    "epsilon_high": f"{ACTOR}.clip_ratio_high",
    "num_iterations": f"{ACTOR}.ppo_epochs",
    **dict.fromkeys(("beta", "kl_coef", "kl_coeff"), f"{ACTOR}.kl_loss_coef"),
    **dict.fromkeys(("per_device_train_batch_size", "micro_batch_size"), f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    **dict.fromkeys(("num_generations", "group_size", "rollouts_per_example", "num_samples"), f"{ROLLOUT}.n"),
    **dict.fromkeys(("max_completion_length", "max_new_tokens", "max_tokens"), "data.max_response_length"),
    "batch_size": "data.train_batch_size",
    "dataset_name": "data.train_files",
    **dict.fromkeys(("model_name_or_path", "model_name", "model_id"), "actor_rollout_ref.model.path"),
    **dict.fromkeys(("lora_r", "lora_rank"), f"{LORA}.rank"),
    "lora_alpha": f"{LORA}.alpha",
    "lora_target_modules": f"{LORA}.target_modules",
    **dict.fromkeys(("max_steps", "num_steps", "train_steps"), "trainer.total_training_steps"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "epochs"), "trainer.total_epochs"),
    **dict.fromkeys(("save_steps", "save_interval"), "trainer.save_freq"),
    **dict.fromkeys(("eval_steps", "eval_interval"), "trainer.test_freq"),
    "output_dir": "trainer.default_local_dir",
    "report_to": "trainer.logger",
    "run_name": "trainer.experiment_name",
}
"""The last part of a key of TRL, prime-rl and others -> the key here. Of a critic's key the critic's is meant."""

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


def suggested_key(key: str) -> str | None:
    """Return the key here that an unknown key means: by its word, or as a slip of spelling; None for neither.

    Where a critic or a reference is not named, the actor's key is meant.
    """
    group, _, word = key.rpartition(".")
    meant = OTHER_WORDS.get(word)
    if meant is not None:
        of_group = f"{group}.{meant.rpartition('.')[2]}"
        return of_group if of_group in KEYS else meant
    like = like_name(key, KEYS)
    role = next((role for role in FOLLOWERS if like is not None and like.startswith(f"{role}.")), None)
    if like is None or role is None or like_name(role.rpartition(".")[2], key.split(".")) is not None:
        return like
    rest = like.removeprefix(f"{role}.")
    return next((one for one in (f"{ACTOR}.{rest}", f"actor_rollout_ref.{rest}") if one in KEYS), like)


def suggested_column(wanted: str, usual: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the column that is meant by one that a file lacks: one with a usual name, or a slip of spelling.

    A column whose name says that it holds answers is taken for nothing else. None where none is.
    """
    others = [name for name in names if name.lower() not in ANSWERS or name.lower() in usual]
    by_name = {name.lower(): name for name in others}
    return next((by_name[name] for name in usual if name in by_name), None) or like_name(wanted, others)
