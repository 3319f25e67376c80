"""Keys of the pretraining loss in PPO (PPO-ptx; Ouyang et al., "Training language models to follow instructions with
human feedback", arXiv:2203.02155, eq. 2). No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from megatron_rl.config.constraints import IsPath, NotNegative, NumPrompts, OneOf
from megatron_rl.config.megatron import follows
from megatron_rl.config.tasks import ExampleKeys


@dataclass
class PretrainingConfig(ExampleKeys):
    """The group `ptx`. Its columns and lengths mean what they mean in `data` for `sft`."""

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
