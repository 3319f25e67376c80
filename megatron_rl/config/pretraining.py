"""Keys of the pretraining loss in PPO (PPO-ptx; Ouyang et al., "Training language models to follow instructions with
human feedback", arXiv:2203.02155, eq. 2). No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rl.config.megatron import follows


@dataclass
class PretrainingConfig:
    """The group `ptx`."""

    coef: float = 0.0
    """Weight of the cross-entropy of further examples in the actor's loss, InstructGPT's gamma; 0: there are none. The
    other keys mean what they mean in `data` for `sft`."""
    files: Any = None
    """Parquet or jsonl file with plain text, conversations, or prompts with answers; or a list of such files."""
    file_weights: list[float] | None = None
    """Shares of the examples that come from each of files, to any total; null: all examples are one set."""
    mini_batch_size: int = follows("actor_rollout_ref.actor.ppo_mini_batch_size")
    """Examples per optimizer step of the actor, beside its samples; in the same micro-batch sizes."""
    max_length: int | None = None
    """Tokens of an example at most; null: data.max_prompt_length + data.max_response_length."""
    truncation: str = "error"
    """Of longer examples: error | left, right: cut that side off | drop: leave them out."""
    messages_key: str | None = None
    """Column with whole conversations. This and the following columns: null: found by the columns' names, and said."""
    prompt_key: str | None = None
    response_key: str | None = None
    text_key: str | None = None
    """Column with plain text."""
    tools_key: str | None = None
    prompt_as_chat: bool | None = None
    append_eos: bool = True
    loss_on: str = "answers"
    """Which tokens count: answers: every turn of the assistant | last: the last answer | all: the prompt, too. Of plain
    text all do."""
    bad_rows: str = "error"
    bad_rows_file: str | None = None
    """Where bad_rows=skip writes its list; null: bad_pretraining_rows.jsonl in trainer.default_local_dir."""
