"""Count, for each request, the engine steps that generated some of its tokens, and the tokens that were drafted for
it."""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.engine.llm_engine import LLMEngine

from megatron_rl.rollout.slices import DraftCounts


class DraftMeter:
    """Reads what passes the scheduler of an engine in this process."""

    def __init__(self, engine: LLMEngine) -> None:
        self._counts: dict[str, DraftCounts] = {}
        core: Any = engine.engine_core
        scheduler = core.engine_core.scheduler
        update = scheduler.update_from_output

        @functools.wraps(update)
        def counted(scheduled: Any, output: Any) -> Any:
            for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
                if tokens:  # none of a prompt that is read in parts
                    drafts = scheduled.scheduled_spec_decode_tokens.get(name, ())
                    self._counts[name] = self._of(name).plus(DraftCounts(0, 1, len(drafts)))
            return update(scheduled, output)

        scheduler.update_from_output = counted

    def take(self, name: str, num_tokens: int) -> DraftCounts:
        """The counts of a request, by vLLM's own name for it, since the last call; num_tokens: what it has got."""
        return self._counts.pop(name, DraftCounts()).plus(DraftCounts(num_tokens))

    def _of(self, name: str) -> DraftCounts:
        return self._counts.get(name, DraftCounts())
