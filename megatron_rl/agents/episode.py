"""One request from its prompt to its end: turns of the policy, with observations between them.

A single turn is an episode without an environment. The tokens of an episode are only ever appended to: what a turn
sampled is what the next turn is given and what is trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_rl.agents.as_json import Answer, Played
from megatron_rl.agents.observation import (
    FAILURES,
    EpisodeFailure,
    InitialConversation,
    Observation,
    TaskRow,
    Turn,
    TurnOptions,
    messages_of_prompt,
)
from megatron_rl.images import Pieces, moved, pieces_between
from megatron_rl.records import Batch, Sampling, ragged, ragged_of_pieces
from megatron_rl.remote_columns import ColumnPiece
from megatron_rl.rollout.slices import FINISHED_BY_LENGTH, FINISHED_BY_STOP, Drawn

FAILED = "failed"
AWAY = "away"
UNREAD = EpisodeFailure("no_answer", "the agent has cancelled all of its requests: it has read no turn")
LIMITED, CUT, OVER = "away_limited", "away_cut", "away_over"
"""Limits at which a turn ended that waits for its reply: the request's tokens; the episode's tokens;
OVER: its reply has come, and no further turn can begin. After the last two the reply ends the episode.
"""
STATES = ("", FINISHED_BY_STOP, FINISHED_BY_LENGTH, FAILED, AWAY, LIMITED, CUT, OVER)
"""`Episode.state` by its number in checkpoints."""


@dataclass(frozen=True)
class Reply:
    """The answer to a turn, or how an episode begins: then there is no turn, and token_ids are its prompt.

    token_ids: what the policy reads before its next turn. is_anew: with them a conversation begins, and the policy does
    not read what came before. images: those of token_ids.
    """

    turn: Turn | None
    answer: Answer
    token_ids: tuple[int, ...] = ()
    is_anew: bool = False
    images: Pieces = ()


@dataclass(frozen=True)
class EpisodeLimits:
    """max_turns: of the policy in an episode. max_retries: how often an episode that fails is generated again.
    max_images: that the policy may read together; None: any number.
    """

    max_turns: int
    max_retries: int = 0
    max_images: int | None = None


@dataclass
class Episode:
    """One request. row: its task.

    token_ids: all tokens after the prompt; is_sampled: of each, whether it is of a turn that the policy sampled for a
    reader. starts: places in token_ids where a conversation begins again, and what comes before is not read. log_probs,
    versions: of the sampled ones. played: the turns that have a response. waits: a turn has ended and has no response
    yet. limit: at which it ended, else "". finish: why the episode ended, or "". attempt: number of restarts with
    another seed; num_retries: those after a failure. experts: those of tokens that the engine has read, from the first
    one on, if they were asked for. A token keeps those that it had when the engine read it first and sampled what
    follows: to read it again, elsewhere or under newer weights, changes nothing. opening: how its environment began it;
    None: it begins with the dataset's prompt. group: requests whose responses are compared with this one, itself among
    them; (): unknown. images: those of its prompt and of token_ids; None: the run reads text.
    """

    prompt_ids: tuple[int, ...]
    row: TaskRow
    sampling: Sampling
    token_ids: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    played: list[Played] = field(default_factory=list)
    waits: bool = False
    limit: str = ""
    finish: str = ""
    attempt: int = 0
    num_retries: int = 0
    experts: list[ColumnPiece] = field(default_factory=list)
    failure: EpisodeFailure | None = None
    opening: InitialConversation | EpisodeFailure | None = None
    group: tuple[int, ...] = ()
    images: Pieces | None = None

    @property
    def state(self) -> str:
        """Why it ended, `AWAY` or its limit if it waits for a response, else ""."""
        return self.limit or AWAY if self.waits else self.finish

    @state.setter
    def state(self, state: str) -> None:
        self.waits = state in (AWAY, LIMITED, CUT, OVER)
        self.limit = state if self.waits and state != AWAY else ""
        self.finish = "" if self.waits else state

    @property
    def room(self) -> int:
        """Tokens that may still follow. The schedule counts requests, so one that could not begin samples a token
        too."""
        return 1 if isinstance(self.opening, EpisodeFailure) else self.sampling.max_tokens - len(self.token_ids)

    @property
    def context_ids(self) -> tuple[int, ...]:
        """The tokens of the present conversation: what the policy reads."""
        return tuple(self.token_ids[self.starts[-1] :]) if self.starts else (*self.prompt_ids, *self.token_ids)

    @property
    def experts_from(self) -> int | None:
        """The number of first tokens of `context_ids` whose experts are recorded; None if none are asked for.

        The engine has read all tokens of an earlier conversation but the last. An episode without their experts, which
        an older checkpoint began, gets none.
        """
        read = (len(self.prompt_ids) + self.starts[-1] - len(self.starts)) if self.starts else 0
        known = sum(piece.length for piece in self.experts) - read
        return known if self.sampling.with_experts and known >= 0 else None

    @property
    def conversation(self) -> InitialConversation:
        """The present conversation, before the present turn."""
        prompt = InitialConversation(messages_of_prompt(self.row.get("prompt")))
        begun = self.opening if isinstance(self.opening, InitialConversation) else prompt
        messages, tools = list(begun.messages), begun.tools
        for turn, observation in self.played:
            messages += [turn.as_message(), *observation.messages]
            if observation.anew is not None:
                messages, tools = list(observation.anew.messages), observation.anew.tools
        return InitialConversation(tuple(messages), tools)

    @property
    def turn_ids(self) -> list[int]:
        """The tokens of the present turn."""
        observed = [place for place, is_sampled in enumerate(self.is_sampled) if not is_sampled]
        return self.token_ids[observed[-1] + 1 :] if observed else self.token_ids

    @property
    def reward(self) -> float:
        """The sum of the rewards of its turns."""
        return sum(observation.reward for _, observation in self.played)

    @property
    def turn_rewards(self) -> torch.Tensor:
        """float32 [sampled tokens]: the reward of each turn on the turn's last token, 0 on all other tokens."""
        sampled = torch.tensor(self.is_sampled, dtype=torch.bool)
        is_end = sampled.clone()
        is_end[:-1] &= ~sampled[1:]
        ends = (sampled.cumsum(0) - 1)[is_end].tolist()
        rewards = torch.zeros(len(self.log_probs))
        turn = 0
        for _, observation in self.played:
            rewards[ends[min(turn, len(ends) - 1)]] += observation.reward
            turn += not observation.is_unread
        return rewards

    @property
    def counts(self) -> Counter[str]:
        """The numbers that its environment counts."""
        total: Counter[str] = Counter()
        for _, observation in self.played:
            total.update(observation.counts)
        return total

    def begin(self, reply: Reply) -> None:
        """Begin with the opening of the environment in place of the dataset's prompt, or fail."""
        assert not isinstance(reply.answer, Observation)
        self.opening = reply.answer
        if isinstance(reply.answer, InitialConversation):
            self.prompt_ids = reply.token_ids
            self.images = reply.images if self.images is not None else None

    def extend(self, new: Drawn, version: int, has_turns: bool, hears_cut: bool = False) -> None:
        """Add the tokens that a slice sampled with the weights of `version`. has_turns: a turn that ends has a
        response. hears_cut: also one that the episode's limit ends.
        """
        if isinstance(self.opening, EpisodeFailure):
            self.failure, self.finish = self.opening, FAILED
            return
        self.token_ids += new.token_ids
        self.is_sampled += [True] * len(new.token_ids)
        self.log_probs += new.log_probs
        self.versions += [version] * len(new.token_ids)
        self.limit = ""
        if has_turns and new.finish == FINISHED_BY_LENGTH:
            is_limited = turn_room(self) <= 0 < self.room
            self.limit = LIMITED if is_limited else CUT if hears_cut else ""
        self.waits = has_turns and (new.finish == FINISHED_BY_STOP or self.limit != "")
        self.finish = "" if self.waits else new.finish
        self.experts += [] if new.experts is None else [new.experts]

    def take(self, reply: Reply, limits: EpisodeLimits, hears_cut: bool = False) -> None:
        """Add the answer to the turn that has ended. Without room for another turn the episode is cut off; with
        hears_cut it then waits for one more reply.

        One that fails begins again, with another seed, as often as may be. Raises ValueError if no turn waits for a
        response.
        """
        if not self.waits:
            raise ValueError("the episode waits for no reply")
        assert reply.turn is not None and not isinstance(reply.answer, InitialConversation)
        was_cut, answer = self.limit in (CUT, OVER), reply.answer
        if isinstance(answer, Observation):
            if answer.is_unread and self.limit != OVER:
                self._leave_out_turn()
            if answer.is_done and self.token_ids and not any(self.is_sampled):
                answer = UNREAD
        self.waits, self.limit = False, ""
        if isinstance(answer, EpisodeFailure):
            if self.num_retries < limits.max_retries:
                self.num_retries += 1
                self.resample()
                return
            self.failure, self.finish = answer, FAILED
            return
        self.played.append((reply.turn, answer))
        if was_cut:
            self.finish = FINISHED_BY_LENGTH
        elif answer.is_done:
            self.finish = FINISHED_BY_STOP
        elif len(self.played) >= limits.max_turns or not has_room_for(self, reply, limits):
            self.waits, self.limit, self.finish = hears_cut, OVER * hears_cut, "" if hears_cut else FINISHED_BY_LENGTH
        else:
            if reply.is_anew:
                self.starts.append(len(self.token_ids))
            if reply.images:
                self.images = (*(self.images or ()), *moved(reply.images, len(self.prompt_ids) + len(self.token_ids)))
            self.token_ids += reply.token_ids
            self.is_sampled += [False] * len(reply.token_ids)

    def _leave_out_turn(self) -> None:
        """Make context of the present turn's tokens, which nothing trains."""
        num_tokens = len(self.turn_ids)
        kept = len(self.log_probs) - num_tokens
        self.is_sampled[len(self.is_sampled) - num_tokens :] = [False] * num_tokens
        del self.log_probs[kept:], self.versions[kept:]

    def truncate(self, is_told: bool = False) -> None:
        """Take the tokens so far as the whole episode. is_told: its environment hears of it, and one more reply ends
        it.
        """
        self.waits, self.finish = is_told, "" if is_told else FINISHED_BY_LENGTH
        has_turn = self.is_sampled[-1:] == [True]
        self.limit = (CUT if has_turn else OVER) * is_told

    def resample(self) -> None:
        """Drop all but the prompt and the opening; what follows is generated again with another seed."""
        self.forget()
        self.attempt += 1

    def forget(self) -> None:
        """Drop all but the prompt and the opening."""
        self.images = None if self.images is None else prompt_images(self)
        self.token_ids, self.is_sampled, self.log_probs, self.versions, self.played = [], [], [], [], []
        self.starts, self.experts = [], []
        self.waits, self.limit, self.finish, self.failure = False, "", "", None


def options_of(episode: Episode) -> TurnOptions:
    """Return the options of the present turn, or of the one that waits."""
    if episode.played:
        return episode.played[-1][1].next_options
    return episode.opening.options if isinstance(episode.opening, InitialConversation) else TurnOptions()


def turn_room(episode: Episode) -> int:
    """Return the number of tokens that the present turn may still have."""
    limit = options_of(episode).max_tokens
    return episode.room if limit is None else min(episode.room, limit - len(episode.turn_ids))


def num_turns(episode: Episode) -> int:
    """Return the number of turns of the policy that have a response; one that could not begin, or had no reader, is
    none.
    """
    return sum((turn.num_tokens > 0 or not turn.is_cut) and not reply.is_unread for turn, reply in episode.played)


def context_images(episode: Episode) -> Pieces:
    """Return the images of an episode's `context_ids`."""
    before = len(episode.prompt_ids)
    start = before + episode.starts[-1] if episode.starts else 0
    return pieces_between(episode.images, start, before + len(episode.token_ids)) if episode.images else ()


def prompt_images(episode: Episode) -> Pieces:
    """Return the images of an episode's prompt."""
    return tuple(piece for piece in episode.images or () if piece.stop <= len(episode.prompt_ids))


def has_room_for(episode: Episode, reply: Reply, limits: EpisodeLimits) -> bool:
    """Return whether the policy can read a reply and take another turn."""
    if reply.images and limits.max_images is not None:
        earlier = 0 if reply.is_anew else len(context_images(episode))
        if earlier + len(reply.images) > limits.max_images:
            return False
    return len(reply.token_ids) < episode.room


def rows_of(episodes: Sequence[Episode], with_versions: bool, has_turns: bool) -> Batch:
    """Return one row per episode, its prompt first. It has experts if any episode has some, starts of conversations if
    any has several.

    has_turns: with the columns `environment_rewards`, `turn_rewards` and `failed`. Of an episode that failed only the
    prompt is left, so that nothing of it is trained.
    """
    kept = [Episode(e.prompt_ids, e.row, e.sampling, finish=e.finish) if e.failure else e for e in episodes]
    experts = [episode.experts for episode in kept]
    int64, versions = torch.int64, [episode.versions for episode in kept] if with_versions else []
    masks = [torch.tensor([False] * len(e.prompt_ids) + e.is_sampled) for e in kept]
    starts = [torch.zeros(len(mask), dtype=torch.bool) for mask in masks] if any(e.starts for e in kept) else []
    for episode, places in zip(kept, starts, strict=False):
        places[[len(episode.prompt_ids) + start for start in episode.starts]] = True
    batch = Batch(
        input_ids=ragged([torch.tensor([*e.prompt_ids, *e.token_ids], dtype=int64) for e in kept]),
        sampled=ragged(masks),
        conversation_starts=ragged(starts) if starts else None,
        rollout_log_probs=ragged([torch.tensor(e.log_probs, dtype=torch.float32) for e in kept]),
        truncated=torch.tensor([e.finish == FINISHED_BY_LENGTH for e in kept]),
        versions=ragged([torch.tensor(row, dtype=int64) for row in versions]) if versions else None,
        routed_experts=ragged_of_pieces(experts) if any(experts) else None,
    )
    if has_turns:
        batch.add(
            turn_rewards=ragged([e.turn_rewards for e in kept]),
            environment_rewards=torch.tensor([e.reward for e in kept], dtype=torch.float32),
            failed=torch.tensor([e.failure is not None for e in episodes]),
        )
    return batch


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the metrics of a step's episodes: turns, rewards and counts of the environment, and failures by cause."""
    ended = [episode for episode in episodes if episode.failure is None]
    causes = Counter(episode.failure.cause for episode in episodes if episode.failure is not None)
    metrics = {"episode/failed_ratio": 1 - len(ended) / len(episodes)}
    metrics |= {f"episode/{cause}": float(causes[cause]) for cause in FAILURES}
    metrics["episode/drawn_again"] = float(sum(episode.num_retries for episode in episodes))
    if not ended:
        return metrics
    turns = [max(num_turns(episode), 1) for episode in ended]
    metrics |= {"num_turns/mean": sum(turns) / len(turns), "num_turns/max": max(turns), "num_turns/min": min(turns)}
    metrics["environment/reward/mean"] = sum(episode.reward for episode in ended) / len(ended)
    counts: Counter[str] = Counter()
    for episode in ended:
        counts.update(episode.counts)  # adding Counters would drop what is below 0
    return metrics | {f"environment/{name}/mean": number / len(ended) for name, number in sorted(counts.items())}
