"""A policy as clients of a service use it: sums of losses, steps, and copies of its state (`megatron-rl serve`).

All ranks of the pool must call every remote method, those with rows each with the rows of its data-parallel rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.config.schema import ActorConfig
from megatron_rl.dispatch import Dispatch, remote_method
from megatron_rl.losses.summed import summed_losses
from megatron_rl.records import Batch
from megatron_rl.roles.policy_followers import SampledPolicy

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.roles.summed_gradients import SummedGradients
    from megatron_rl.roles.token_scorer import TokenScorer
    from megatron_rl.roles.training_states import TrainingStates


def adapter_shards(policy: ServedPolicy, copy: str, folder: str) -> list[Tensor]:
    """This rank's training shards of a copy's adapters, for `AdapterSlots.fill`. folder: with its files; "" for a copy
    in host memory.
    """
    return policy._kept_states.flat_weights(copy, policy._file(folder) if folder else None)


class ServedPolicy(SampledPolicy):
    """A policy that clients may train step by step. client_scorer: log-probs at temperature 1, over the tokens that
    the rollout may sample."""

    config: ActorConfig
    client_scorer: TokenScorer
    _summed: SummedGradients | None = None
    _states: TrainingStates | None = None

    @remote_method(Dispatch.DP, phase="update", balanced=True)
    def add_gradients(
        self, batch: Batch, loss: str, settings: Mapping[str, float]
    ) -> tuple[dict[str, float], Batch | None]:
        """Add the gradients of a loss of `losses.summed` over all sampled tokens to those since the last step.

        batch: with `advantages` (or weights), and `old_log_probs` and `kept` where the loss reads them. Returns the
        loss, and `old_log_probs` of this pass, on the last stage.
        """
        return self._gradients_of_clients.add(batch, summed_losses(self.config)[loss], settings)

    @remote_method(Dispatch.DP, phase="score", balanced=True)
    def client_log_probs(self, batch: Batch) -> Batch | None:
        """`old_log_probs`: the log-prob of every sampled token at temperature 1; None before the last stage."""
        if self.trainable.pipeline.routing is not None:
            self.trainable.pipeline.routing.begin(replays=False, records=False)
        return self.client_scorer.score("old_log_probs", batch, self.score_cut)

    @remote_method(Dispatch.DP, phase="score", balanced=True)
    def client_top_k(self, batch: Batch, k: int) -> Batch | None:
        """`teacher_top_ids` and `teacher_top_log_probs`: the k likeliest tokens in place of every sampled one, at
        temperature 1; None before the last stage.
        """
        if self.trainable.pipeline.routing is not None:
            self.trainable.pipeline.routing.begin(replays=False, records=False)
        best = self.client_scorer.top_k(batch, self.score_cut, k)
        if best is None:
            return None
        ids, log_probs = (batch.per_sampled_token(values) for values in best)
        return Batch(teacher_top_ids=ids, teacher_top_log_probs=log_probs)

    @remote_method(Dispatch.ONE_TO_ALL, phase="update")
    def step_client(self, adam: Mapping[str, float]) -> dict[str, float]:
        """Reduce the sums over all ranks and update with `AdamStep(**adam)`; the metrics of the step on every rank."""
        from megatron_rl.roles.summed_gradients import AdamStep

        return self._gradients_of_clients.step(AdamStep(**adam)).metrics("client")

    @remote_method(Dispatch.ONE_TO_ALL, phase="update")
    def keep_state(self, name: str, parts: Sequence[str]) -> int:
        """Copy parts of the state to host memory; returns the bytes on each rank."""
        return self._kept_states.keep(name, parts)

    @remote_method(Dispatch.ONE_TO_ALL, phase="update")
    def take_state(self, name: str, parts: Sequence[str], seed: int | None = None) -> None:
        """Continue with parts of a copy; moments and gradients that are not asked for are 0. seed: adapters begin
        again, with its initial values.
        """
        from megatron_rl.model.adapters import begin_again

        self._kept_states.take(name, parts)
        if seed is not None:
            adapters = self.trained.parameters, self.source.adapter_specs, self.source.lora
            self._kept_states.write_weights(lambda: begin_again(*adapters, seed, self.source.place))

    @remote_method(Dispatch.ONE_TO_ALL, phase="update")
    def take_weights_alone(self, name: str) -> None:
        """Put the weights of a copy in place; moments and gradients stay."""
        self._kept_states.take_weights(name)

    @remote_method(Dispatch.ONE_TO_ALL, phase="update")
    def write_state(self, folder: str, parts: Sequence[str]) -> int:
        """Write parts of the state to a file of each rank; returns the bytes on each rank."""
        return self._kept_states.write(self._file(folder), parts)

    @remote_method(Dispatch.ONE_TO_ALL, phase="update")
    def read_state(self, folder: str, parts: Sequence[str]) -> None:
        """Continue with parts of what was written to a folder; moments and gradients that are not asked for are 0."""
        self._kept_states.read(self._file(folder), parts)

    @remote_method(Dispatch.ONE_TO_ALL, phase="update")
    def read_weights_alone(self, folder: str) -> None:
        """Put the weights of a folder in place; moments and gradients stay."""
        self._kept_states.read_weights(self._file(folder))

    @remote_method(Dispatch.ONE_TO_ALL, phase="update")
    def remove_state(self, folder: str) -> None:
        """Remove what was written to a folder."""
        self._file(folder).unlink(missing_ok=True)
        with suppress(OSError):  # until the last rank of a node has removed its file
            Path(folder).rmdir()

    @remote_method(Dispatch.ONE_TO_ALL, phase="update")
    def write_copy(self, name: str, folder: str) -> int:
        """Write a copy to a file of each rank; returns the bytes on each rank."""
        return self._kept_states.write_copy(name, self._file(folder))

    @remote_method(Dispatch.ONE_TO_ALL, phase="update")
    def read_copy(self, name: str, folder: str) -> None:
        """Have the files of a folder as a copy in host memory."""
        self._kept_states.read_copy(name, self._file(folder))

    @remote_method(Dispatch.ONE_TO_ALL, phase="update")
    def remove_other_states(self, root: str, folders: Sequence[str]) -> None:
        """Remove this rank's file from every folder below `root` but these."""
        kept = {self._file(folder) for folder in folders}
        for folder, _, names in os.walk(root, topdown=False):  # which passes over folders that others remove
            for name in names:
                if name.partition(".")[0] == str(self.rank.groups.rank) and Path(folder, name) not in kept:
                    Path(folder, name).unlink()
            with suppress(OSError):  # those with files of other ranks stay
                Path(folder).rmdir()

    def _file(self, folder: str) -> Path:
        return Path(folder) / f"{self.rank.groups.rank}.safetensors"

    @remote_method(Dispatch.ONE_TO_ALL, phase="update")
    def drop_state(self, name: str) -> None:
        """Forget a copy."""
        self._kept_states.drop(name)

    @property
    def _gradients_of_clients(self) -> SummedGradients:
        from megatron_rl.roles.summed_gradients import SummedGradients

        if self._summed is None:
            self._summed = SummedGradients(self.trainable, self.client_scorer, self.cut)
        return self._summed

    @property
    def _kept_states(self) -> TrainingStates:
        from megatron_rl.roles.training_states import TrainingStates

        if self._states is None:
            self._summed = self._gradients_of_clients  # which clears the buffers that a copy may fill
            self._states = TrainingStates(self.trainable)
        return self._states
