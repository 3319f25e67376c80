"""Drafts from earlier responses to the same prompt: what vLLM asks for draft tokens after every engine step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.config import VllmConfig

from megatron_rl.config.rollout_keys import EARLIER, RolloutConfig
from megatron_rl.rollout.draft_search import Tokens, guess, joined


class EarlierProposer:
    """vLLM builds it by its name in `speculative_config` and calls `propose`, which needs `attach` before.

    What it drafts for a request depends on the request and on the number of requests in the step alone, so all
    ranks of a rollout TP group draft the same.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Compiles the search."""
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._runner: Any = None
        self._earlier: dict[str, Tokens] = {}
        guess(np.zeros(2, dtype=np.int32), joined(()), 1, 1, 1)

    def load_model(self, model: object) -> None:
        """Called by vLLM on CPUs. There is no draft model."""

    def attach(self, runner: Any, config: RolloutConfig) -> None:
        """Say whose requests they are. runner: vLLM's own of this rank, which has their names and arguments."""
        self._runner = runner
        self._least, self._most = config.prompt_lookup_min, config.prompt_lookup_max
        self._num_tokens = config.num_speculative_tokens
        self._max_requests = config.speculative_disable_by_batch_size or config.max_num_seqs

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return the draft tokens for each row of the step. sampled_token_ids: of each row; empty where none was
        generated yet.

        num_tokens_no_spec: int32 [rows], tokens of each request; token_ids_cpu: int32 [rows, max_model_len].
        """
        if len(sampled_token_ids) > self._max_requests:
            return [[] for _ in sampled_token_ids]
        names = self._runner.input_batch.req_ids
        self._earlier = {name: tokens for name, tokens in self._earlier.items() if name in self._runner.requests}
        guesses: list[list[int]] = []
        for row, drawn in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            room = min(self._num_tokens, self._max_model_len - length)
            if not drawn or room <= 0:
                guesses.append([])
                continue
            own = token_ids_cpu[row, :length]
            guesses.append(guess(own, self._earlier_of(names[row]), self._least, self._most, room))
        return guesses

    def _earlier_of(self, name: str) -> Tokens:
        """The responses of `Start.earlier`, which the request has among its further arguments."""
        if name not in self._earlier:
            arguments = self._runner.requests[name].sampling_params.extra_args or {}
            self._earlier[name] = joined(arguments.get(EARLIER, ()))
        return self._earlier[name]
