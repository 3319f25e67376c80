"""Samples of copies: models as clients have saved them, or as the service starts.

Where generation has several slots for adapters, copies are brought there and sampled together, and nothing of training
moves. Elsewhere a copy takes the place of the actor's weights, which come back behind its samples. So it does in any
case for log-probs of prompts, which the actor computes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megatron_rl.records import Sampling
from megatron_rl.rollout.seeds import request_seed
from megatron_rl.rollout.slices import FINISHED_BY_STOP, Drawn, Slice, Start
from megatron_rl.serve.client_commands import Row, SampleTokens
from megatron_rl.serve.client_rows import batch_of
from megatron_rl.serve.protobuf import encoded
from megatron_rl.serve.resident_copies import ResidentCopies, batches
from megatron_rl.serve.sample_request import cut_at
from megatron_rl.serve.tinker_messages import SAMPLE_RESPONSE, sampled_sequence, top_of_prompt

if TYPE_CHECKING:
    from megatron_rl.roles.actor import Actor
    from megatron_rl.roles.rollout import Rollout

WEIGHTS = "weights"
AT_START, IN_TRAINING = "start", "in training"
"""Names of copies that no client has made: the weights as the service starts, and those that sampling has replaced."""


class CopySampler:
    """Samples the models that clients have saved. num_replicas, num_slots: the rollout's replicas, and adapter slots.
    folder_of: where the ranks have the files of a copy; "" for one in their memory. decode: tokens -> their text."""

    def __init__(
        self,
        actor: Actor,
        rollout: Rollout,
        num_replicas: int,
        num_slots: int,
        folder_of: Callable[[str], str],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._actor, self._rollout, self._num_replicas = actor, rollout, num_replicas
        self._folder_of, self._decode = folder_of, decode
        self.resident = ResidentCopies(num_slots)
        self.num_samplings = 0
        actor.keep_state(AT_START, (WEIGHTS,)).get()

    def sample(self, commands: Sequence[SampleTokens], in_actor: Collection[str]) -> list[bytes]:
        """The replies. in_actor: copies whose weights those in the actor's memory are."""
        replies: dict[int, bytes] = {}
        for places in batches([_copy_of(one) for one in commands], self.resident.num_slots):
            replies |= zip(places, self._together([commands[place] for place in places], in_actor), strict=True)
        return [replies[place] for place in range(len(commands))]

    def _together(self, commands: Sequence[SampleTokens], in_actor: Collection[str]) -> list[bytes]:
        if self.resident.num_slots == 1:
            copy = _copy_of(commands[0])
            with self._in_place(copy, in_actor):
                contents = self._of_prompts(commands, {copy})
                drawn = self._drawn(commands, dict.fromkeys([copy], 0))
        else:
            contents = self._of_prompts(commands, in_actor)
            drawn = self._drawn(commands, self._slots_of([_copy_of(one) for one in commands]))
        replies, first = list[bytes](), 0
        for command, of_prompt in zip(commands, contents, strict=True):
            sequences = [drawn[number] for number in range(first, first + command.num_samples)]
            first += command.num_samples
            content = {"sequences": [self._sequence(one, command) for one in sequences]} | of_prompt
            replies.append(encoded(content, SAMPLE_RESPONSE))
        return replies

    def _sequence(self, one: Drawn, command: SampleTokens) -> dict[str, Any]:
        """A sequence up to the first text that ends it."""
        end = cut_at(command.stop_texts, one.token_ids, self._decode) if command.stop_texts else None
        is_stopped = end is not None or one.finish == FINISHED_BY_STOP
        return sampled_sequence(one.token_ids[:end], one.log_probs[:end], is_stopped)

    # Where copies are

    @contextmanager
    def _in_place(self, copy: str, in_actor: Collection[str]) -> Iterator[None]:
        """The weights of a copy are in the place of training's meanwhile."""
        if copy in in_actor:
            yield
            return
        self._actor.keep_state(IN_TRAINING, (WEIGHTS,)).get()
        self._put(copy)
        try:
            yield
        finally:
            self._put(IN_TRAINING)

    def _put(self, copy: str) -> None:
        if copy in (AT_START, IN_TRAINING):
            self._actor.take_weights_alone(copy).get()
        else:
            self._actor.read_weights_alone(self._folder_of(copy)).get()

    def _slots_of(self, copies: Sequence[str]) -> dict[str, int]:
        """The slots of copies, no more than there are slots; those that are in none are brought."""
        slots = {copy: self.resident.use(copy) for copy in dict.fromkeys(copies)}
        for copy, slot in slots.items():
            if slot is None:
                slots[copy] = room = self.resident.make_room()
                self._rollout.fill_slot(room, copy, "" if copy == AT_START else self._folder_of(copy)).get()
                self.resident.note(copy, room)
        return {copy: slot for copy, slot in slots.items() if slot is not None}

    # Tokens

    def _drawn(self, commands: Sequence[SampleTokens], slots: dict[str, int]) -> dict[int, Drawn]:
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
                seed, slot = request_seed(command.seed, 0, 0, place), slots[_copy_of(command)]
                starts.append(Start(len(starts), command.prompt, seed, command.max_tokens, sampling, slot=slot))
        self.num_samplings += 1
        shares = [tuple(starts[number :: self._num_replicas]) for number in range(self._num_replicas)]
        slices = {replica: Slice(self.num_samplings, None, share) for replica, share in enumerate(shares) if share}
        self._rollout.enter().get()
        try:
            reports = self._rollout.advance(slices).get()
        finally:
            self._rollout.exit().get()
        return {number: drawn for report in reports for number, drawn in report.drawn.items()}

    # Prompts

    def _of_prompts(self, commands: Sequence[SampleTokens], in_actor: Collection[str]) -> list[dict[str, Any]]:
        """Return the fields of each reply that are about its command's prompt."""
        contents: list[dict[str, Any]] = [{} for _ in commands]
        asking = [place for place, one in enumerate(commands) if one.prompt_log_probs or one.prompt_top]
        for copy in dict.fromkeys(_copy_of(commands[place]) for place in asking):
            of_copy = [place for place in asking if _copy_of(commands[place]) == copy]
            scored = [place for place in of_copy if commands[place].prompt_log_probs]
            with self._in_place(copy, in_actor):
                log_probs = self._prompt_log_probs([commands[place].prompt for place in scored])
                for place, row in zip(scored, log_probs, strict=True):
                    contents[place]["prompt_logprobs"] = array("f", [math.nan, *row]).tobytes()
                for place in of_copy:
                    if k := commands[place].prompt_top:
                        contents[place]["topk_prompt_logprobs"] = self._prompt_top(commands[place].prompt, k)
        return contents

    def _prompt_top(self, prompt: tuple[int, ...], k: int) -> dict[str, Any]:
        if len(prompt) == 1:
            return top_of_prompt(k, (), ())
        best = self._actor.client_top_k(batch_of([Row(prompt, (0.0,) * (len(prompt) - 1))]), k).get()
        assert best is not None
        return top_of_prompt(k, best["teacher_top_ids"][0].tolist(), best["teacher_top_log_probs"][0].tolist())

    def _prompt_log_probs(self, prompts: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """The log-probs of all tokens but the first of every prompt."""
        scored = [Row(prompt, (0.0,) * (len(prompt) - 1)) for prompt in prompts if len(prompt) > 1]
        if not scored:
            return [[] for _ in prompts]
        scores = self._actor.client_log_probs(batch_of(scored)).get()
        assert scores is not None
        rows = iter([row.tolist() for row in scores["old_log_probs"].unbind()])
        return [next(rows) if len(prompt) > 1 else [] for prompt in prompts]


def _copy_of(command: SampleTokens) -> str:
    return command.weights or AT_START
