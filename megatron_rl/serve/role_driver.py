"""Runs the commands of a service on the roles of a run: actor and rollout in one pool.

Models take turns in the actor's memory. A model's state leaves for host memory when another one's turn comes. What
clients have saved are files; weights are put in place while they sample, and then those of training again.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.losses.policy import PolicyTokens
from megatron_rl.losses.summed import SummedLoss
from megatron_rl.records import Sampling
from megatron_rl.rollout.seeds import request_seed
from megatron_rl.rollout.slices import FINISHED_BY_STOP, Drawn, Slice, Start
from megatron_rl.serve.client_commands import (
    Command,
    CreateModel,
    DropCopy,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    Row,
    SampleTokens,
    SaveWeights,
    UnloadModel,
    client_path,
)
from megatron_rl.serve.protobuf import encoded
from megatron_rl.serve.request_journal import digest_of
from megatron_rl.serve.sample_request import cut_at
from megatron_rl.serve.tinker_messages import (
    FORWARD_BACKWARD_OUTPUT,
    SAMPLE_RESPONSE,
    forward_backward_output,
    sampled_sequence,
    top_of_prompt,
)

if TYPE_CHECKING:
    from megatron_rl.records import Batch
    from megatron_rl.roles.actor import Actor
    from megatron_rl.roles.rollout import Rollout

WEIGHTS, MOMENTS, GRADIENTS = "weights", "moments", "gradients"
WHOLE = (WEIGHTS, MOMENTS, GRADIENTS)
STATES_FOLDER, LIVE = "states", "live-"
"""In a run's folder: a folder of each copy that clients have saved, with a file of each rank."""
AT_START, IN_TRAINING = "start", "in training"
"""Names of copies that no client has made: the weights as the service starts, and those that sampling has replaced."""


class RoleDriver:
    """Runs one command after the other. num_replicas: the rollout's. losses: by their names. folder: for what clients
    save. decode: tokens -> their text."""

    def __init__(
        self,
        actor: Actor,
        rollout: Rollout,
        num_replicas: int,
        losses: Mapping[str, SummedLoss],
        folder: Path,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._actor, self._rollout, self._num_replicas, self._losses = actor, rollout, num_replicas, losses
        self._folder, self._decode = folder, decode
        self._in_snapshot: set[str] = set()  # copies that existed at the journal's snapshot
        self._num_snapshots = 0
        self._model: str | None = None  # whose state is in the actor's memory
        self._as_saved: set[str] = set()  # copies whose weights those in the actor's memory are
        self._num_samplings = 0
        actor.keep_state(AT_START, (WEIGHTS,)).get()

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
        counts = {"num_snapshots": self._num_snapshots, "num_samplings": self._num_samplings}
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
        self._num_snapshots, self._num_samplings = kept["num_snapshots"], kept["num_samplings"]
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

    # Sampling

    def sample(self, commands: Sequence[SampleTokens]) -> list[bytes]:
        """The replies of samples of the same weights, which are drawn together."""
        weights = commands[0].weights or AT_START
        is_elsewhere = weights not in self._as_saved
        if is_elsewhere:
            self._actor.keep_state(IN_TRAINING, (WEIGHTS,)).get()
            self._put(weights)
        try:
            of_prompts = self._prompt_log_probs([one for one in commands if one.prompt_log_probs])
            tops = [self._prompt_top(one) for one in commands]
            drawn = self._drawn(commands)
        finally:
            if is_elsewhere:
                self._put(IN_TRAINING)
        replies = []
        first = 0
        for command, top in zip(commands, tops, strict=True):
            sequences = [drawn[number] for number in range(first, first + command.num_samples)]
            first += command.num_samples
            content: dict[str, Any] = {"sequences": [self._sequence(one, command) for one in sequences]}
            if command.prompt_log_probs:
                content["prompt_logprobs"] = array("f", [math.nan, *of_prompts.pop(0)]).tobytes()
            if top is not None:
                content["topk_prompt_logprobs"] = top
            replies.append(encoded(content, SAMPLE_RESPONSE))
        return replies

    def _sequence(self, one: Drawn, command: SampleTokens) -> dict[str, Any]:
        """A sequence up to the first text that ends it."""
        end = cut_at(command.stop_texts, one.token_ids, self._decode) if command.stop_texts else None
        is_stopped = end is not None or one.finish == FINISHED_BY_STOP
        return sampled_sequence(one.token_ids[:end], one.log_probs[:end], is_stopped)

    def _prompt_top(self, command: SampleTokens) -> dict[str, Any] | None:
        if not (k := command.prompt_top):
            return None
        if len(command.prompt) == 1:
            return top_of_prompt(k, (), ())
        rows = [Row(command.prompt, (0.0,) * (len(command.prompt) - 1))]
        best = self._actor.client_top_k(batch_of(rows), k).get()
        assert best is not None
        return top_of_prompt(k, best["teacher_top_ids"][0].tolist(), best["teacher_top_log_probs"][0].tolist())

    def _put(self, copy: str) -> None:
        """Put the weights of a copy in place."""
        if copy in (AT_START, IN_TRAINING):
            self._actor.take_weights_alone(copy).get()
        else:
            self._actor.read_weights_alone(self._folder_of(copy)).get()

    def _drawn(self, commands: Sequence[SampleTokens]) -> dict[int, Drawn]:
        starts: list[Start] = []
        for command in commands:
            sampling = Sampling(
                command.temperature,
                command.top_p,
                command.top_k or -1,
                command.max_tokens,
                0,
                stop_token_ids=command.stop,
            )
            for place in range(command.num_samples):
                seed = request_seed(command.seed, 0, 0, place)
                starts.append(Start(len(starts), command.prompt, seed, command.max_tokens, sampling))
        self._num_samplings += 1
        shares = [tuple(starts[number :: self._num_replicas]) for number in range(self._num_replicas)]
        slices = {replica: Slice(self._num_samplings, None, share) for replica, share in enumerate(shares) if share}
        self._rollout.enter().get()
        try:
            reports = self._rollout.advance(slices).get()
        finally:
            self._rollout.exit().get()
        return {number: drawn for report in reports for number, drawn in report.drawn.items()}

    def _prompt_log_probs(self, commands: Sequence[SampleTokens]) -> list[list[float]]:
        """The log-probs of all tokens but the first of every prompt."""
        rows = [Row(one.prompt, (0.0,) * (len(one.prompt) - 1)) for one in commands]
        scored = [row for row in rows if len(row.token_ids) > 1]
        if not scored:
            return [[] for _ in rows]
        scores = self._actor.client_log_probs(batch_of(scored)).get()
        assert scores is not None
        found = iter([row.tolist() for row in scores["old_log_probs"].unbind()])
        return [next(found) if len(row.token_ids) > 1 else [] for row in rows]


def batch_of(rows: Sequence[Row]) -> Batch:
    """Rows in which every token but the first counts, with the columns that losses read."""
    import torch

    from megatron_rl.records import Batch, ragged

    tokens = [torch.tensor(row.token_ids) for row in rows]
    batch = Batch(
        input_ids=ragged(tokens),
        sampled=ragged([torch.arange(len(row)) > 0 for row in tokens]),
        advantages=ragged([torch.tensor(row.weights, dtype=torch.float32) for row in rows]),
    )
    if rows[0].counted:
        batch.add(kept=ragged([torch.tensor(row.counted, dtype=torch.float32) for row in rows]))
    if rows[0].log_probs:
        batch.add(old_log_probs=ragged([torch.tensor(row.log_probs, dtype=torch.float32) for row in rows]))
    return batch
