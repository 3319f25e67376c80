"""What one step computes, over all ranks: samples, tokens, mini-batches, and how well hardware is used. No layout."""

from __future__ import annotations

from dataclasses import dataclass

COLLECTIVE_LATENCY = 47.2e-6
"""Seconds of a small collective of a decode step, with waiting for the last rank; calibrated."""
RL_SHARE = 0.777
"""Efficiency of passes over short sequences of many lengths, as a share of that of long training; calibrated."""
DECODE_OVERHEAD = 6.35e-3
"""Seconds of the engine in a decode step, in addition to the GPU's work; calibrated."""


@dataclass(frozen=True)
class Load:
    """Computation of one step, over all ranks.

    num_samples: sequences. prompt, response: mean tokens; max_response: the limit. mini_batch: samples of an optimizer
    step. block_tokens: tokens of one micro-batch on a rank. max_seqs: sequences that a replica decodes at once.
    recompute: share of the layers that run forward twice. efficiency_share: of the hardware's efficiency, in training.
    decode_overhead, collective_latency: seconds, where the hardware file has none. overlaps_dp: data-parallel traffic
    is hidden. mixed: examples that every optimizer step reads in addition, as num_samples and prompt. head_products: of
    a response's tokens with the vocabulary head in an update, beyond those of its passes. rows_of_prompt: samples of a
    prompt whose passes compute it once (`enable_tree_training`). tower: FLOPs of a trained vision tower for a sample's
    image, forward: with matrices and in attention.
    """

    num_samples: int
    prompt: float
    response: float
    max_response: int
    mini_batch: int
    block_tokens: int
    epochs: int = 1
    max_seqs: int = 256
    recompute: float = 0.0
    efficiency_share: float = RL_SHARE
    decode_overhead: float = DECODE_OVERHEAD
    collective_latency: float = COLLECTIVE_LATENCY
    overlaps_dp: bool = False
    mixed: Load | None = None
    head_products: float = 0.0
    rows_of_prompt: int = 1
    tower: tuple[float, float] = (0.0, 0.0)

    def computed_length(self, samples: float) -> float:
        """Return the mean tokens of a sample that pass the model, where a rank has that many samples."""
        return self.prompt / self._sharing(samples) + self.response

    def attended_length(self, samples: float) -> float:
        """Return the length of a sequence whose tokens see as many keys as the tokens that pass the model."""
        if self._sharing(samples) == 1:
            return self.length
        seen = self.prompt**2 / self._sharing(samples) + self.response * (2 * self.prompt + self.response)
        return seen / self.computed_length(samples)

    def tower_flops(self, attention_share: float) -> float:
        """Return the FLOPs of a trained tower for a sample at the rate of products: forward twice, and backward."""
        matrices, attention = self.tower
        return 4 * (matrices + attention / attention_share)

    @property
    def least_tokens(self) -> float:
        """Tokens that pass the model where every prompt's samples are on one rank."""
        return self.num_samples * self.computed_length(self.num_samples)

    @property
    def least_attended(self) -> float:
        """`attended_length` there."""
        return self.attended_length(self.num_samples)

    def _sharing(self, samples: float) -> float:
        return max(1.0, min(self.rows_of_prompt, samples))

    @property
    def length(self) -> float:
        return self.prompt + self.response

    @property
    def num_tokens(self) -> float:
        return self.num_samples * self.length

    @property
    def num_updates(self) -> int:
        """Optimizer steps in one step."""
        return self.epochs * max(1, round(self.num_samples / self.mini_batch))
