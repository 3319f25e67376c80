"""Keys of the tasks beside PPO: sft, reward and dpo. No torch.

A task takes one optimizer step per step, on `data.train_batch_size` examples, each read once per epoch; nothing is
generated. `sft` and `dpo` train the actor, under `actor_rollout_ref.actor`; `reward` trains the critic's architecture,
under `critic`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt, Le

from megatron_rl.config.constraints import OURS, FilePath, NotNegative, OneOf, Positive
from megatron_rl.config.declarations import PREFERENCE_LOSSES, REWARD_MODEL_LOSSES

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
    """How examples with answers are read: for sft, reward and dpo in `data`, for PPO's pretraining loss in `ptx`."""

    max_length: Annotated[int | None, Ge(2)] = None
    """Tokens of prompt and answer at most; null: data.max_prompt_length + data.max_response_length. truncation says
    what becomes of longer rows."""
    messages_key: str | None = None
    """Column with whole conversations, lists of {role, content}. null, here and for all columns below: found by the
    columns' names, and reported. Fields of structs are named with a dot."""
    response_key: str | None = None
    """Column with the answer to prompt_key."""
    text_key: Annotated[str | None, OURS] = None
    """Column with plain text."""
    tools_key: str | None = None
    """Column with the tools of a conversation, for the chat template."""
    prompt_as_chat: Annotated[bool | None, OURS] = None
    """Whether a prompt that is text becomes a user's message of the chat template. null: in tasks without generation as
    the columns suggest; else such a prompt is sent as it is."""
    append_eos: Annotated[bool, OURS] = True
    """End an answer with the end token where nothing else ends it."""
    loss_on: Annotated[str, OneOf(LOSS_ON), OURS] = "answers"
    """sft and ptx: which tokens are learned. answers: every turn of the assistant | last: the last answer | all: the
    prompt, too. Of plain text all are."""
    bad_rows: Annotated[str, OneOf(BAD_ROWS), OURS] = "error"
    """Rows that cannot be used. error: refuse the files, naming the rows | skip: leave them out and list them in
    bad_rows_file."""
    bad_rows_file: Annotated[FilePath | None, OURS] = None
    """Where bad_rows=skip writes its list; null: bad_rows.jsonl, of ptx bad_pretraining_rows.jsonl, in
    trainer.default_local_dir."""


@dataclass
class TaskDataConfig(ExampleKeys):
    """Keys of `data` for sft, reward and dpo; PPO reads none of them but prompt_as_chat."""

    chosen_key: Annotated[str | None, OURS] = None
    """Column with the preferred answer, or conversation."""
    rejected_key: Annotated[str | None, OURS] = None
    """Column with the other one."""
    answers_key: Annotated[str | None, OURS] = None
    """Column with a list of answers, the best first unless ranks_key or scores_key says otherwise."""
    ranks_key: Annotated[str | None, OURS] = None
    """Column with a rank for each of them, the lower the better."""
    scores_key: Annotated[str | None, OURS] = None
    """Column with a score for each of them, the higher the better."""
    label_key: Annotated[str | None, OURS] = None
    """kto: column that says whether an answer is desirable."""
    score_key: Annotated[str | None, OURS] = None
    """Regression: column with an answer's score."""
    margin_key: Annotated[str | None, OURS] = None
    """Column with how much better the chosen answer is, or with the scores whose differences say so."""


@dataclass
class RewardTrainingConfig:
    loss: Annotated[str, OneOf(REWARD_MODEL_LOSSES)] = "all_pairs"
    """all_pairs: of every two answers to a prompt the better one should score higher (Bradley and Terry), and each
    prompt counts once | plackett_luce: the likelihood of the whole order | regression: squared error to the scores of
    the file."""
    use_margins: bool = True
    """all_pairs: the better answer should score higher by the margin that the file has for the two."""


@dataclass
class DPOConfig:
    loss: Annotated[list[str], OneOf(PREFERENCE_LOSSES)] = field(default_factory=lambda: ["dpo"])
    """One of dpo | hinge | robust | ipo | apo_zero | apo_down | sppo_hard | nca_pair | simpo | orpo | kto | sft, or a
    list of them, whose sum is learned. Formulas: docs/train/algorithms.md."""
    loss_weights: list[float] | None = None
    """The weight of each of several losses in their sum; null: 1 each."""
    beta: Positive = 0.1
    """How strongly the policy is held to the reference; of ipo the regularisation tau, of hinge 1 / the margin, of
    simpo the scale of rewards, of orpo the weight of the odds ratio."""
    label_smoothing: Annotated[float, Ge(0), Le(0.5)] = 0.0
    """dpo and robust, which needs less than 0.5: the share of preferences that is taken to be the wrong way round."""
    f_divergence_type: Annotated[str, OneOf(F_DIVERGENCES)] = "reverse_kl"
    """dpo, hinge, robust, ipo: the divergence that holds the policy to the reference."""
    f_alpha_divergence_coef: Annotated[float, Gt(0), Le(1)] = 0.5
    """alpha_divergence: its coefficient; near 0 it is reverse_kl, at 1 forward_kl."""
    simpo_gamma: NotNegative = 0.5
    """simpo: the margin of rewards that is aimed at."""
    desirable_weight: NotNegative = 1.0
    """kto: weight of desirable answers."""
    undesirable_weight: NotNegative = 1.0
    """kto: weight of the other answers."""
    reference: Annotated[str, OneOf(REFERENCES)] = "stored"
    """Log-probs of the reference, which is the policy as it starts. stored: computed once before the first step, and
    kept in checkpoints | on_the_fly: a frozen copy on the same ranks scores every batch."""
