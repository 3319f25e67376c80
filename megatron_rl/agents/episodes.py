"""Answer the turns of open episodes: a turn goes to its environment as text, and what it reads next comes as tokens."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megatron_rl.agents.as_json import Answer, WithImages
from megatron_rl.agents.environment_host import TurnJob
from megatron_rl.agents.episode import CUT, OVER, Episode, EpisodeLimits, Reply, options_of
from megatron_rl.agents.image_parts import images_of
from megatron_rl.agents.observation import (
    FOLLOWING,
    EpisodeFailure,
    InitialConversation,
    Message,
    Observation,
    TaskRow,
    Turn,
)
from megatron_rl.agents.turn_reader import TurnReader
from megatron_rl.agents.turn_renderer import NO_LIMIT, TurnRenderer
from megatron_rl.data.message_form import tool_names
from megatron_rl.data.template_process import TemplateRefusal
from megatron_rl.errors import ConfigError, ReplayError
from megatron_rl.images import Pieces
from megatron_rl.plain_values import describe_error


class Environments(Protocol):
    """Where environments are. opens: they begin their episodes. hears_cuts: they hear of one that is cut off."""

    @property
    def opens(self) -> bool: ...

    @property
    def hears_cuts(self) -> bool: ...

    def play(self, number: int, job: TurnJob) -> None:
        """Have a turn played; the reply comes with `take`."""

    def take(self, waits: bool) -> Sequence[tuple[int, Answer | WithImages]]:
        """Return the replies that exist, by the numbers of `play`. waits: until there is one, if a job is open."""

    def forget(self, episode: int) -> None:
        """Drop the environment of an episode, if there is one."""


class ImageError(Exception):
    """An observation shows an image that cannot be read."""


class ShownImages(Protocol):
    """Images of prompts and of turns."""

    def keep(self, images: Mapping[str, str]) -> None:
        """Keep images in base64 by their keys."""

    def turn_written_out(
        self, token_ids: Sequence[int], keys: Sequence[str | None], prompt: Pieces
    ) -> tuple[list[int], Pieces]:
        """Return the tokens of messages with all placeholders of their images, and the pieces of these."""

    def encoded(self, pieces: Pieces) -> list[bytes]:
        """Return the encoded images of a prompt."""


class Episodes:
    """Answers turns. The number of an episode is that of its request.

    record: is called with every reply. notes: for the user. late_notes: those of the run itself, to be said and
    taken out.
    """

    def __init__(self, limits: EpisodeLimits) -> None:
        self.limits = limits
        self.notes: list[str] = []
        self.late_notes: list[str] = []
        self.record: Callable[[int, Reply], None] = lambda number, reply: None
        self._arrived: list[tuple[int, Reply]] = []

    @property
    def is_open(self) -> bool:
        """Whether a turn waits for its reply."""
        raise NotImplementedError

    def hears_cut(self, number: int) -> bool:
        """Return whether the environment of an episode hears that no tokens or turns are left."""
        return False

    def submit(self, number: int, episode: Episode) -> None:
        """Have the turn answered with which an episode waits."""
        raise NotImplementedError

    def forget(self, number: int) -> None:
        """Drop what belongs to an episode that has ended or begins again."""

    def take(self, waits: bool = False) -> list[tuple[int, Reply]]:
        """Return the replies that exist. waits: until there is one, if a turn waits for its reply."""
        arrived, self._arrived = self._arrived, []
        return arrived or self._take(waits)

    def take_of(self, numbers: Collection[int], waits: bool) -> list[tuple[int, Reply]]:
        """Return the replies to these episodes that exist; those to others are kept for `take`. waits: until there
        is one, which must have been submitted.
        """
        while True:
            own: list[tuple[int, Reply]] = []
            for number, reply in self._take(waits):
                (own if number in numbers else self._arrived).append((number, reply))
            if own or not waits:
                return own

    def submit_new(self, new: Mapping[int, Episode]) -> set[int]:
        """Have environments begin episodes; returns those that one begins, which comes as a reply without a turn. The
        others keep the dataset's prompt.
        """
        return {number for number, episode in new.items() if self._begins(number, episode)}

    def begin(self, new: Mapping[int, Episode]) -> None:
        """Begin episodes, and wait for it."""
        waiting = self.submit_new(new)
        while waiting:
            for number, reply in self.take_of(waiting, waits=True):
                waiting.remove(number)
                new[number].begin(reply)

    def _begins(self, number: int, episode: Episode) -> bool:
        """Return whether an environment begins this episode; its opening then comes as a reply."""
        raise NotImplementedError

    def _take(self, waits: bool) -> list[tuple[int, Reply]]:
        replies = self._replies(waits)
        for number, reply in replies:
            self.record(number, reply)
        return replies

    def _replies(self, waits: bool) -> list[tuple[int, Reply]]:
        raise NotImplementedError


class RecordedEpisodes(Episodes):
    """Answers turns as a recorded run did; no environment runs.

    Raises ReplayError where a turn is another than the recorded one.
    """

    def __init__(self, limits: EpisodeLimits, recorded: Iterable[tuple[int, Reply]]) -> None:
        """recorded: (number, reply) in the order in which a run had them."""
        super().__init__(limits)
        self._recorded: dict[int, deque[Reply]] = defaultdict(deque)
        for number, reply in recorded:
            self._recorded[number].append(reply)
        self._ready: list[tuple[int, Reply]] = []

    @property
    def is_open(self) -> bool:
        return bool(self._ready)

    def hears_cut(self, number: int) -> bool:
        recorded = self._recorded[number]
        # A run that did not tell them has recorded no reply.
        return bool(recorded) and recorded[0].turn is not None and recorded[0].turn.is_cut

    def submit(self, number: int, episode: Episode) -> None:
        if not self._recorded[number]:
            raise ReplayError(f"a turn of request {number} ended that has no reply in the recorded schedule")
        self._ready.append((number, self._recorded[number].popleft()))

    def _begins(self, number: int, episode: Episode) -> bool:
        recorded = self._recorded[number]
        if not recorded or recorded[0].turn is not None:
            return False
        self.submit(number, episode)
        return True

    def _replies(self, waits: bool) -> list[tuple[int, Reply]]:
        ready, self._ready = self._ready, []
        return ready


@dataclass(frozen=True)
class _OpenTurn:
    """A turn that waits for its reply. turn: None while the episode itself begins. last_token: of the turn.

    before: the conversation before the turn. room: tokens that may still follow. shown: images of the dataset's prompt.
    """

    number: int
    turn: Turn | None = None
    last_token: int = -1
    before: InitialConversation | None = None
    room: int = NO_LIMIT
    shown: Pieces = ()


class LiveEpisodes(Episodes):
    """Answers turns by environments."""

    def __init__(
        self,
        environments: Environments,
        renderer: TurnRenderer,
        reader: TurnReader,
        limits: EpisodeLimits,
        longest_prompt: int = NO_LIMIT,
        appending: Collection[str] = FOLLOWING,
        images: ShownImages | None = None,
    ) -> None:
        """longest_prompt: tokens with which an environment may begin an episode. appending: roles of messages that the
        template appends; behind others a turn begins with the whole conversation, rendered again. images: of prompts
        and turns; None: they are text.
        """
        super().__init__(limits)
        self._environments, self._renderer, self._reader = environments, renderer, reader
        self._longest_prompt, self._appending = longest_prompt, frozenset(appending)
        self._shown: set[tuple[str, ...]] = set()
        self._open: dict[int, _OpenTurn] = {}
        self._jobs_of: dict[int, list[int]] = {}  # episode -> those of _open
        self._failed: list[tuple[int, Reply]] = []
        self._jobs = itertools.count()
        self._images = images
        self._rows: dict[int, TaskRow] = {}  # episode -> its task, with the images of its prompt

    @property
    def is_open(self) -> bool:
        return bool(self._open or self._failed or self._arrived)

    def hears_cut(self, number: int) -> bool:
        return self._environments.hears_cuts

    def submit(self, number: int, episode: Episode) -> None:
        ids, before = episode.turn_ids, episode.conversation
        if episode.limit == OVER:
            turn = Turn("", num_context=len(episode.context_ids), is_cut=True)
            self._submit(episode, _OpenTurn(number, turn, before=before))
            return
        try:
            turn = self._turn(episode, ids, before.tools)
        except ConfigError:
            raise
        except Exception as error:  # tools of an agent's; it costs this episode alone
            failure = EpisodeFailure("no_answer", f"the turn cannot be read: {describe_error(error)}")
            self._failed.append((number, Reply(Turn(""), failure)))
            return
        self._submit(episode, _OpenTurn(number, turn, ids[-1], before, episode.room, episode.row.get("images", ())))

    def _turn(self, episode: Episode, ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> Turn:
        """The turn with these tokens. Raises what readers raise."""
        options, num_context = options_of(episode), len(episode.context_ids) - len(ids)
        log_probs = episode.log_probs[-len(ids) :] if options.with_log_probs else []
        drawn = tuple((self._reader.text_of(token), value) for token, value in zip(ids, log_probs, strict=False))
        turn = self._reader.turn(ids, () if options.is_text else tools)
        return replace(turn, num_tokens=len(ids), num_context=num_context, is_cut=episode.limit != "", drawn=drawn)

    def _begins(self, number: int, episode: Episode) -> bool:
        if self._environments.opens:
            self._submit(episode, _OpenTurn(number, room=episode.room, shown=episode.row.get("images", ())))
        return self._environments.opens

    def _submit(self, episode: Episode, new: _OpenTurn) -> None:
        job, opening = next(self._jobs), episode.opening if isinstance(episode.opening, InitialConversation) else None
        self._open[job] = new
        self._jobs_of.setdefault(new.number, []).append(job)
        is_over, row = episode.limit in (CUT, OVER), self._row(new.number, episode)
        played = tuple(episode.played)
        self._environments.play(job, TurnJob(new.number, row, played, new.turn, opening, is_over=is_over))

    def _row(self, number: int, episode: Episode) -> TaskRow:
        """The task of an episode, with the encoded images of the dataset's prompt."""
        if self._images is None or "images" not in episode.row:
            return episode.row
        if number not in self._rows:
            self._rows[number] = {**episode.row, "images": self._images.encoded(episode.row["images"])}
        return self._rows[number]

    def _close(self, job: int) -> _OpenTurn:
        turn = self._open.pop(job)
        jobs = self._jobs_of[turn.number]
        jobs.remove(job)
        if not jobs:
            del self._jobs_of[turn.number]
        return turn

    def forget(self, number: int) -> None:
        for job in self._jobs_of.pop(number, ()):
            del self._open[job]
        self._rows.pop(number, None)
        self._failed = [(known, reply) for known, reply in self._failed if known != number]
        self._environments.forget(number)

    def _replies(self, waits: bool) -> list[tuple[int, Reply]]:
        failed, self._failed = self._failed, []
        answers = self._environments.take(waits and not failed)
        known = [(self._close(job), answer) for job, answer in answers if job in self._open]
        return failed + [(known.number, self._reply(known, answer)) for known, answer in known]

    def _reply(self, known: _OpenTurn, answer: Answer | WithImages) -> Reply:
        images = answer.images if isinstance(answer, WithImages) else {}
        answer = answer.answer if isinstance(answer, WithImages) else answer
        if isinstance(answer, EpisodeFailure) or (isinstance(answer, Observation) and answer.is_done):
            return Reply(known.turn, answer)
        try:
            self._keep(images)
            begins = answer if isinstance(answer, InitialConversation) else answer.anew
            if begins is not None:
                self._look_for(begins.tools)
            if isinstance(answer, InitialConversation):
                begun = self._renderer.beginning(answer, self._longest_prompt)
                return self._begun(answer, *self._with_images(begun, answer.messages, known, self._longest_prompt))
            anew = answer.anew or self._rewritten(known, answer)
            if anew is not None:
                ids, pieces = self._with_images(
                    self._renderer.beginning(anew, known.room), anew.messages, known, known.room
                )
                return Reply(known.turn, answer, tuple(ids), is_anew=True, images=pieces)
            earlier = known.before.messages if known.before is not None else ()
            num_calls = sum(len(message.get("tool_calls") or ()) for message in earlier)
            ids = self._renderer.following(answer.messages, known.last_token, known.turn, num_calls, known.room)
            ids, pieces = self._with_images(ids, answer.messages, known, known.room)
        except TemplateRefusal as refusal:
            reason = f"the chat template rejects the observation of the environment: {refusal}"
            return Reply(known.turn, EpisodeFailure("no_answer", reason))
        except ImageError as error:
            return Reply(known.turn, EpisodeFailure("no_answer", f"an observation with images: {error}"))
        except Exception as error:  # a template or tokenizer at what somebody else wrote; it costs this episode alone
            reason = f"the observation of the environment cannot be tokenized: {describe_error(error)}"
            return Reply(known.turn, EpisodeFailure("no_answer", reason))
        return Reply(known.turn, answer, tuple(ids), images=pieces)

    def _with_images(
        self, ids: list[int], messages: Sequence[Message], known: _OpenTurn, most: int
    ) -> tuple[list[int], Pieces]:
        """Return the tokens of messages with all placeholders of their images, and these. most: tokens; where there are
        more, no image is read. Raises ImageError for images that cannot be read.
        """
        keys = images_of(messages)
        if self._images is None:
            if keys:
                raise ImageError("this run reads text alone (data.image_key=null)")
            return ids, ()
        try:
            return (ids, ()) if len(ids) > most else self._images.turn_written_out(ids, keys, known.shown)
        except ValueError as error:
            raise ImageError(str(error)) from None

    def _keep(self, images: Mapping[str, str]) -> None:
        """Keep new images. Raises ImageError."""
        if self._images is None:
            return
        try:
            self._images.keep(images)
        except ValueError as error:
            raise ImageError(str(error)) from None

    def _look_for(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Note tools that the template does not write, once. Raises TemplateRefusal."""
        names = tuple(tool_names(tools))
        is_new = names not in self._shown
        self._shown.add(names)
        if names and is_new and self._renderer.unwritten_tools(tools):
            what = f"the policy cannot see the {len(names)} tools of an agent ({', '.join(names)[:80]})"
            self.late_notes.append(f"the chat template writes no tools: {what}")

    def _rewritten(self, known: _OpenTurn, answer: Observation) -> InitialConversation | None:
        """The whole conversation, where the template does not append."""
        is_appended = all(message["role"] in self._appending for message in answer.messages)
        if is_appended or known.turn is None or known.before is None:
            return None
        messages = (*known.before.messages, known.turn.as_message(), *answer.messages)
        return InitialConversation(messages, known.before.tools)

    def _begun(self, opening: InitialConversation, prompt_ids: Sequence[int], images: Pieces) -> Reply:
        if len(prompt_ids) <= self._longest_prompt:
            return Reply(None, opening, tuple(prompt_ids), images=images)
        rule = f"its conversation has at least {len(prompt_ids)} tokens; data.max_prompt_length={self._longest_prompt}"
        return Reply(None, EpisodeFailure("no_answer", f"the episode cannot begin: {rule}"))
