"""Keys of the tasks other than PPO: sft, reward and dpo; and of PPO's pretraining loss. No torch.

A task takes one optimizer step per step, on `data.train_batch_size` examples, each read once per epoch; nothing is
generated. `sft` and `dpo` train the actor, under `actor_rollout_ref.actor`; `reward` trains the critic's architecture,
under `critic`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from megatron_rl.config.constraints import OURS, FilePath, IsPath, NotNegative, NumPrompts, OneOf, Positive
from megatron_rl.config.declarations import PREFERENCE_LOSSES, REWARD_MODEL_LOSSES
from megatron_rl.config.megatron import follows

PPO, SFT, REWARD, DPO = "ppo", "sft", "reward", "dpo"
TASKS = (PPO, SFT, REWARD, DPO)
WITHOUT_ROLLOUT = (SFT, REWARD, DPO)
"""Tasks that do not generate."""

LOSS_ON = ("answers", "last", "all")
BAD_ROWS = ("error", "skip")
REFERENCES = ("stored", "on_the_fly")
F_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


@dataclass
class ExampleKeys:
    """How examples with responses are read: for sft, reward and dpo in `data`, for PPO's pretraining loss in `ptx`."""

    max_length: Annotated[int | None, Ge(2)] = None
    """Largest number of tokens of prompt and response together; null: data.max_prompt_length +
    data.max_response_length. `truncation` decides about longer rows."""
    messages_key: str | None = None
    """Column with whole conversations, lists of {role, content}; a field of a struct is named with a dot. null (here
    and for the other columns of examples): found by the columns' names, and reported."""
    response_key: str | None = None
    """Column with the response to prompt_key."""
    text_key: Annotated[str | None, OURS] = None
    """Column with plain text, for examples without a prompt."""
    tools_key: str | None = None
    """Column with the tools of a conversation, which the chat template gets."""
    prompt_as_chat: Annotated[bool | None, OURS] = None
    """Render a prompt that is plain text as a user's message of the chat template. null: for sft, reward and dpo as the
    columns suggest; for PPO plain text stays as it is."""
    append_eos: Annotated[bool, OURS] = True
    """Append the end-of-sequence token to a response that does not end with one."""
    loss_on: Annotated[str, OneOf(LOSS_ON), OURS] = "answers"
    """sft and ptx: tokens in the loss. answers: every assistant turn | last: the last assistant turn | all: the prompt,
    too. Of plain text always all."""
    bad_rows: Annotated[str, OneOf(BAD_ROWS), OURS] = "error"
    """Rows that cannot be used. error: stop and name the rows | skip: leave them out and list them in bad_rows_file."""
    bad_rows_file: Annotated[FilePath | None, OURS] = None
    """File for the rows that bad_rows=skip leaves out; null: bad_rows.jsonl (ptx: bad_pretraining_rows.jsonl) in
    trainer.default_local_dir."""


@dataclass
class TaskDataConfig(ExampleKeys):
    """Keys of `data` for sft, reward and dpo; PPO reads none of them but prompt_as_chat."""

    chosen_key: Annotated[str | None, OURS] = None
    """Column with the preferred response, or conversation."""
    rejected_key: Annotated[str | None, OURS] = None
    """Column with the rejected response, or conversation."""
    answers_key: Annotated[str | None, OURS] = None
    """Column with a list of responses, the best one first unless ranks_key or scores_key is set."""
    ranks_key: Annotated[str | None, OURS] = None
    """Column with a rank for each response of answers_key; lower is better."""
    scores_key: Annotated[str | None, OURS] = None
    """Column with a score for each response of answers_key; higher is better."""
    label_key: Annotated[str | None, OURS] = None
    """kto: column with true for a desirable response, false for an undesirable one."""
    score_key: Annotated[str | None, OURS] = None
    """reward_training.loss=regression: column with the score of a response."""
    margin_key: Annotated[str | None, OURS] = None
    """Column with the margin by which the chosen response is better, or with scores whose difference is the margin."""


@dataclass
class PretrainingConfig(ExampleKeys):
    """The group `ptx`: the pretraining loss in PPO (PPO-ptx; Ouyang et al., "Training language models to follow
    instructions with human feedback", arXiv:2203.02155, eq. 2). Columns and lengths mean what they mean in `data` for
    `sft`.
    """

    coef: NotNegative = 0.0
    """PPO-ptx: weight of the cross-entropy of further examples in the actor's loss (InstructGPT's gamma); 0: off."""
    files: Annotated[Any, IsPath()] = None
    """Parquet or jsonl file with plain text, conversations, or prompts with responses; or a list of such files."""
    file_weights: list[float] | None = None
    """Shares of the examples that come from each of files, to any total; null: all examples are one set."""
    mini_batch_size: NumPrompts = follows("actor_rollout_ref.actor.ppo_mini_batch_size")
    """Further examples per optimizer step of the actor, in addition to its samples, with the same micro-batch sizes."""
    truncation: Annotated[str, OneOf(("error", "left", "right", "drop"))] = "error"
    """Examples longer than max_length: error | left, right: cut that side off | drop: leave them out."""
    prompt_key: str | None = None
    """Column of ptx.files with the prompt; null: found by the columns' names, and reported."""


@dataclass
class RewardTrainingConfig:
    loss: Annotated[str, OneOf(REWARD_MODEL_LOSSES)] = "all_pairs"
    """Loss of the reward model. all_pairs: in every pair of responses to a prompt the better one should score higher
    (Bradley and Terry); each prompt counts once | plackett_luce: likelihood of the whole ranking | regression: squared
    error to the scores of the file."""
    use_margins: bool = True
    """all_pairs: the better response should score higher by the margin that the file has for the pair."""


@dataclass
class DPOConfig:
    loss: Annotated[list[str], OneOf(PREFERENCE_LOSSES)] = field(default_factory=lambda: ["dpo"])
    """Preference loss: dpo | hinge | robust | ipo | apo_zero | apo_down | sppo_hard | nca_pair | simpo | orpo | kto |
    sft, or a list of them, whose weighted sum is the loss. Formulas: docs/train/algorithms.md."""
    loss_weights: list[float] | None = None
    """Weights of the losses in dpo.loss; null: 1 each."""
    beta: Positive = 0.1
    """DPO's beta: larger keeps the policy closer to the reference. ipo: the regularisation tau; hinge: 1 / margin;
    simpo: scale of rewards; orpo: weight of the odds ratio."""
    label_smoothing: Annotated[float, Ge(0), Le(0.5)] = 0.0
    """dpo, robust: assumed share of preference pairs whose labels are swapped; robust needs less than 0.5."""
    f_divergence_type: Annotated[str, OneOf(F_DIVERGENCES)] = "reverse_kl"
    """dpo, hinge, robust, ipo: divergence between policy and reference."""
    f_alpha_divergence_coef: Annotated[float, Gt(0), Le(1)] = 0.5
    """f_divergence_type=alpha_divergence: its coefficient; near 0 it is reverse_kl, at 1 forward_kl."""
    simpo_gamma: NotNegative = 0.5
    """simpo: target margin between the rewards of a pair."""
    desirable_weight: NotNegative = 1.0
    """kto: weight of desirable responses."""
    undesirable_weight: NotNegative = 1.0
    """kto: weight of undesirable responses."""
    reference: Annotated[str, OneOf(REFERENCES)] = "stored"
    """Log-probs of the reference, which is the policy before the first step. stored: computed once before the first
    step and kept in checkpoints | on_the_fly: a frozen copy of the model computes them for every batch."""
