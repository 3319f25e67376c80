"""Runs the commands of a service on the roles of a run: actor and rollout in one pool.

Models take turns in the actor's memory. A model's state leaves for host memory when another one's turn comes. What
clients have saved are files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.losses.policy import PolicyTokens
from megatron_rl.losses.summed import SummedLoss
from megatron_rl.serve.client_commands import (
    Command,
    CreateModel,
    DropCopy,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    SampleTokens,
    SaveWeights,
    UnloadModel,
    client_path,
)
from megatron_rl.serve.client_rows import batch_of
from megatron_rl.serve.copy_sampler import AT_START, WEIGHTS, CopySampler
from megatron_rl.serve.protobuf import encoded
from megatron_rl.serve.request_journal import digest_of
from megatron_rl.serve.tinker_messages import (
    FORWARD_BACKWARD_OUTPUT,
    forward_backward_output,
)

if TYPE_CHECKING:
    from megatron_rl.roles.actor import Actor
    from megatron_rl.roles.rollout import Rollout

MOMENTS, GRADIENTS = "moments", "gradients"
WHOLE = (WEIGHTS, MOMENTS, GRADIENTS)
STATES_FOLDER, LIVE = "states", "live-"
"""In a run's folder: a folder of each copy that clients have saved, with a file of each rank."""


class RoleDriver:
    """Runs one command after the other. num_replicas, num_slots: the rollout's, for `CopySampler`. losses: by their
    names. folder: for what clients save. decode: tokens -> their text."""

    def __init__(
        self,
        actor: Actor,
        rollout: Rollout,
        num_replicas: int,
        num_slots: int,
        losses: Mapping[str, SummedLoss],
        folder: Path,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._actor, self._losses, self._folder = actor, losses, folder
        self._sampler = CopySampler(actor, rollout, num_replicas, num_slots, self._folder_of, decode)
        self._in_snapshot: set[str] = set()  # copies that existed at the journal's snapshot
        self._num_snapshots = 0
        self._model: str | None = None  # whose state is in the actor's memory
        self._as_saved: set[str] = set()  # copies whose weights those in the actor's memory are

    @property
    def num_slots(self) -> int:
        """Copies that can be sampled together."""
        return self._sampler.resident.num_slots

    def run(self, command: Command) -> Any:
        """What the command comes to: JSON, or bytes in Protocol Buffers."""
        match command:
            case CreateModel():
                return self._create(command)
            case ForwardBackward():
                return self._pass(command)
            case OptimStep():
                self._hold(command.model)
                self._as_saved.clear()
                metrics = self._actor.step_client(dict(command.adam)).get()[0]
                finite = {name.removeprefix("client/"): x for name, x in metrics.items() if math.isfinite(x)}
                return {"metrics": {f"{name}:max": value for name, value in finite.items()}}
            case SaveWeights():
                return self._save(command)
            case LoadWeights():
                self._hold(command.model)
                self._take(command.path, command.with_optimizer)
                return {"type": "load_weights", "path": client_path(command.path), "model_id": command.model}
            case SampleTokens():
                return self.sample([command])[0]
            case UnloadModel():
                if self._model == command.model:
                    self._model = None
                self._actor.drop_state(command.model).get()
                return {"type": "unload_model", "model_id": command.model}
            case DropCopy():
                self._as_saved.discard(command.copy)
                self._sampler.resident.forget(command.copy)
                if command.copy not in self._in_snapshot:  # a repetition that begins there may read it
                    self._actor.remove_state(self._folder_of(command.copy)).get()
                return {}

    # Models

    def _hold(self, model: str) -> None:
        """Have the state of a model in the actor's memory."""
        if self._model != model:
            self._leave()
            self._actor.take_state(model, WHOLE).get()
            self._model = model
            self._as_saved.clear()

    def _leave(self) -> None:
        if self._model is not None:
            self._actor.keep_state(self._model, WHOLE).get()
            self._model = None

    def _folder_of(self, copy: str) -> str:
        """Where the ranks have the files of a copy."""
        return str(self._folder / digest_of(copy.encode()))

    def _take(self, copy: str, with_optimizer: bool) -> None:
        if copy == AT_START:
            self._actor.take_state(copy, (WEIGHTS,)).get()
        else:
            self._actor.read_state(self._folder_of(copy), (WEIGHTS, MOMENTS) if with_optimizer else (WEIGHTS,)).get()
        self._as_saved = {copy}

    def _create(self, command: CreateModel) -> dict[str, Any]:
        self._leave()
        if command.seed is None:
            self._take(command.path or AT_START, command.with_optimizer)
        else:
            self._actor.take_state(AT_START, (WEIGHTS,), command.seed).get()
            self._as_saved = set()
        self._model = command.model
        path = client_path(command.path)
        of_state = {"type": "load_weights", "path": path} if path else {"type": "create_model"}
        return of_state | {"model_id": command.model}

    def _save(self, command: SaveWeights) -> dict[str, Any]:
        self._hold(command.model)
        parts = (WEIGHTS,) if command.for_sampling else (WEIGHTS, MOMENTS)
        size = {"size_bytes": sum(self._actor.write_state(self._folder_of(command.path), parts).get())}
        self._as_saved.add(command.path)
        path = {"path": client_path(command.path)}
        if not command.for_sampling:
            return {"type": "save_weights"} | path | size
        kind = {"type": "save_weights_for_sampler"} | size
        return kind | ({"sampling_session_id": command.sampler} if command.sampler else path)

    # Snapshots

    def _live(self, number: int, model: str) -> str:
        return str(self._folder / f"{LIVE}{number}" / digest_of(model.encode()))

    def keep(self, models: Sequence[str], copies: Sequence[str]) -> dict[str, Any]:
        """Write the states of all models; returns what another driver continues with, as JSON. copies: those to be
        kept, too.
        """
        self._leave()
        self._num_snapshots += 1
        for model in models:
            self._actor.write_copy(model, self._live(self._num_snapshots, model)).get()
        counts = {"num_snapshots": self._num_snapshots, "num_samplings": self._sampler.num_samplings}
        return {"models": list(models), "copies": list(copies)} | counts

    def settle(self, kept: Mapping[str, Any]) -> None:
        """Remove every file that the journal's snapshot does not name: nothing reads an older one any more."""
        number, self._in_snapshot = kept["num_snapshots"], set(kept["copies"])
        folders = [self._folder_of(copy) for copy in kept["copies"]]
        folders += [self._live(number, model) for model in kept["models"]]
        self._actor.remove_other_states(str(self._folder), folders).get()

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Continue with what `keep` has returned. The driver must be new."""
        self.settle(kept)
        self._num_snapshots, self._sampler.num_samplings = kept["num_snapshots"], kept["num_samplings"]
        for model in kept["models"]:
            self._actor.read_copy(model, self._live(self._num_snapshots, model)).get()

    # Passes

    def _pass(self, command: ForwardBackward) -> bytes:
        import torch

        self._hold(command.model)
        batch = batch_of(command.rows)
        if command.forward_only:
            scores = self._actor.client_log_probs(batch).get()
            assert scores is not None
            log_probs = scores["old_log_probs"]
            flat = log_probs.values()
            given = batch.flat("old_log_probs") if "old_log_probs" in batch else flat
            kept = batch.flat("kept") if "kept" in batch else None
            tokens = PolicyTokens(flat, given, batch.flat("advantages"), batch.num_sampled, kept)
            metrics = {"loss:sum": float(self._losses[command.loss].function(tokens, command.settings).sum())}
        else:
            metrics, computed = self._actor.add_gradients(batch, command.loss, dict(command.settings)).get()
            assert computed is not None
            log_probs = computed["old_log_probs"]
        rows = [row.to(torch.float32).tolist() for row in log_probs.unbind()]
        return encoded(forward_backward_output(rows, metrics), FORWARD_BACKWARD_OUTPUT)

    def sample(self, commands: Sequence[SampleTokens]) -> list[bytes]:
        """The replies; at most `num_slots` copies are sampled together."""
        return self._sampler.sample(commands, self._as_saved)
