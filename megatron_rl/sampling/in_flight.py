"""The episodes that are not trained yet: prompt, tokens so far, and log-prob and version of each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from megatron_rl.agents.as_json import EpisodeRecord, records_as_json, records_from_json
from megatron_rl.agents.episode import STATES, Episode, EpisodeLimits, Reply, rows_of
from megatron_rl.agents.observation import Opening
from megatron_rl.records import Batch, Conversation, Prompts, Sampling, ragged
from megatron_rl.rollout.slices import DraftCounts, Drawn, Start
from megatron_rl.sampling.schedule_types import GroupSwap

SeedOf = Callable[[int, int, int, int, int], int]
"""(salt, prompt index, sample, attempt, number of tokens after the prompt) -> seed."""
EarlierOf = Callable[[int, int], tuple[bytes, ...]]
"""(prompt index, batch) -> earlier responses to this prompt, which requests of this batch name: see `Start.earlier`."""


PromptsOf = Callable[[Sequence[int]], Prompts]
"""Rows over all files -> their prompts."""


@dataclass
class InFlightBatch:
    """Prompts of a step and their episodes. greedy: the prompts of greedy responses, which come last in `episodes`."""

    prompts: Prompts
    greedy: Prompts | None
    episodes: list[Episode]


class InFlightBatches:
    """The batches that are begun and not trained, by step. All batches have the same number of rows.

    The number of a request is (step - 1) * batch_rows + row; greedy responses are the last rows.
    """

    def __init__(
        self,
        batch_rows: int,
        seed_of: SeedOf,
        with_versions: bool = True,
        limits: EpisodeLimits | None = None,
        earlier_of: EarlierOf = lambda index, batch: (),
    ) -> None:
        """with_versions: of tokens; False where all of a batch are of the newest weights.

        limits: of episodes; None: nothing answers a turn, and the first one is the last.
        """
        self.batch_rows, self._seed_of, self._with_versions = batch_rows, seed_of, with_versions
        self._earlier_of = earlier_of
        self._limits = limits
        self._batches: dict[int, InFlightBatch] = {}
        self._drafts: dict[int, DraftCounts] = {}
        self._moved: set[int] = set()

    @property
    def has_turns(self) -> bool:
        """Whether a turn that ends gets a reply."""
        return self._limits is not None

    def add(self, step: int, prompts: Prompts, sampling: Sampling, greedy: Prompts | None, greedily: Sampling) -> None:
        """Begin a batch. Raises ValueError if its number of rows is not batch_rows."""
        episodes = [new for rows, how in ((prompts, sampling), (greedy, greedily)) for new in new_episodes(rows, how)]
        if len(episodes) != self.batch_rows:
            raise ValueError(f"a batch has {self.batch_rows} requests, this one of step {step} {len(episodes)}")
        self._batches[step] = InFlightBatch(prompts, greedy, episodes)

    def start(self, request: int) -> Start:
        """The message with which a replica begins a request or continues it."""
        episode = self.episode(request)
        earlier = self._earlier_of(episode.row["index"], request // self.batch_rows + 1)
        return start_of(request, episode, self._seed_of, earlier)

    def extend(self, drawn: dict[int, Drawn], version: int) -> list[int]:
        """Add the tokens that a slice generated with the weights of `version`; returns requests whose turn waits for
        its reply.
        """
        for request, new in drawn.items():
            self.episode(request).extend(new, version, self.has_turns)
            if new.drafts is not None:
                step = request // self.batch_rows + 1
                self._drafts[step] = self.drafts(step).plus(new.drafts)
        return [request for request in drawn if self.episode(request).waits]

    def take(self, request: int, reply: Reply) -> bool:
        """Add the reply to a turn; returns whether the request is finished."""
        episode = self.episode(request)
        assert self._limits is not None
        episode.take(reply, self._limits)
        return episode.finish != ""

    @property
    def away(self) -> list[int]:
        """Requests whose turn waits for its reply."""
        return [request for request, episode in self._kept(0).items() if episode.waits]

    def batch(self, step: int) -> tuple[Prompts, Batch, Batch | None]:
        """Prompts of a step, their rows, and greedy responses or None. Raises ValueError if a response is not
        finished.
        """
        batch = self._batches[step]
        unfinished = [row for row, episode in enumerate(batch.episodes) if not episode.finish]
        if unfinished:
            raise ValueError(f"rows {unfinished[:8]} of batch {step} are not finished")
        num_rows = len(batch.prompts)
        greedy = None if batch.greedy is None else self._rows(batch.episodes[num_rows:])
        sampled = self.sampled_episodes(step)
        return begun_prompts(batch.prompts, sampled), self._rows(sampled), greedy

    @property
    def unbegun(self) -> dict[int, Episode]:
        """Episodes that have the dataset's prompt, and no token yet."""
        return {
            (step - 1) * self.batch_rows + row: episode
            for step, batch in sorted(self._batches.items())
            for row, episode in enumerate(batch.episodes)
            if episode.opening is None and not (episode.token_ids or episode.finish)
        }

    def sampled_episodes(self, step: int) -> list[Episode]:
        """The episodes of a step's rows, without greedy responses; none of a batch that is not begun."""
        batch = self._batches.get(step)
        return [] if batch is None else batch.episodes[: len(batch.prompts)]

    def drafts(self, step: int) -> DraftCounts:
        """What drafts did for the responses of a batch, in this process; zeros without draft tokens."""
        return self._drafts.get(step, DraftCounts())

    def swap_groups(self, swap: GroupSwap) -> None:
        """Late prompts and their episodes change places with finished ones of the next batch."""
        step = swap.late[0] // self.batch_rows + 1
        here, after = self._batches[step], self._batches[step + 1]
        both = Prompts.joined([here.prompts, after.prompts])
        rows, first = torch.arange(len(both)), (step - 1) * self.batch_rows
        rows[[request - first for request in swap.new_place.values()]] = torch.tensor(
            [request - first for request in swap.new_place]
        )
        episodes = [(here.episodes + after.episodes)[row] for row in rows.tolist()]
        moved, num_rows = both[rows], len(here.prompts)
        for batch, part in ((here, slice(0, num_rows)), (after, slice(num_rows, None))):
            batch.prompts = replace(moved[part], uid=batch.prompts.uid)
            batch.episodes = episodes[part]
        self._moved |= swap.new_place.keys()

    def trained(self, step: int) -> None:
        """Drop the batches up to that of `step`."""
        self._batches = {begun: batch for begun, batch in self._batches.items() if begun > step}
        self._drafts = {begun: counts for begun, counts in self._drafts.items() if begun > step}
        self._moved = {request for request in self._moved if request >= step * self.batch_rows}

    def episode(self, request: int) -> Episode:
        """The episode of a request."""
        step, row = divmod(request, self.batch_rows)
        return self._batches[step + 1].episodes[row]

    def tensors(self, after_step: int) -> dict[str, torch.Tensor]:
        """The episodes of batches after a step, for a checkpoint; prompts are not among them and are read again.

        requests int64 [N, 4]: number, attempt, length, state (see `STATES`). Of all requests end to end: token_ids
        int64 and is_sampled bool [T]; of the sampled ones versions int64 and log_probs float32. played uint8: what
        `records_as_json` returns. moved int64 [M, 4], of requests whose prompts have changed places: number, the
        prompt's row over all files, sample, and the step in which it began.
        """
        kept = self._kept(after_step)
        moved = [
            [number, e.row["index"], e.row["sample"], e.sampling.salt]
            for number in sorted(self._moved)
            if number >= after_step * self.batch_rows
            for e in [self.episode(number)]
        ]
        rows = [[number, e.attempt, len(e.token_ids), STATES.index(e.state)] for number, e in kept.items()]
        episodes = kept.values()
        records = {
            number: EpisodeRecord(
                e.played, e.failure, e.opening, () if e.opening is None else e.prompt_ids, e.starts, e.num_retries
            )
            for number, e in kept.items()
            if e.played or e.failure or e.opening or e.num_retries
        }
        return {
            "played": torch.tensor(list(records_as_json(records).encode()), dtype=torch.uint8),
            "moved": torch.tensor(moved, dtype=torch.int64).reshape(-1, 4),
            "requests": torch.tensor(rows, dtype=torch.int64).reshape(-1, 4),
            "token_ids": torch.tensor([token for e in episodes for token in e.token_ids], dtype=torch.int64),
            "is_sampled": torch.tensor([value for e in episodes for value in e.is_sampled], dtype=torch.bool),
            "versions": torch.tensor([version for e in episodes for version in e.versions], dtype=torch.int64),
            "log_probs": torch.tensor([value for e in episodes for value in e.log_probs], dtype=torch.float32),
        }

    def load_tensors(self, tensors: dict[str, torch.Tensor], prompts_of: PromptsOf | None = None) -> None:
        """Load what `tensors` returned; the batches must be added before. prompts_of: needed where prompts have changed
        places. Raises KeyError, TypeError, ValueError for other content.
        """
        if "moved" in tensors and len(tensors["moved"]):
            self._load_moved(tensors["moved"], prompts_of)
        lengths = tensors["requests"][:, 2].tolist()
        is_sampled = tensors.get("is_sampled", torch.ones_like(tensors["token_ids"], dtype=torch.bool)).split(lengths)
        num_sampled = [int(mask.sum()) for mask in is_sampled]
        parts = zip(
            tensors["requests"].tolist(),
            tensors["token_ids"].split(lengths),
            is_sampled,
            *(tensors[name].split(num_sampled) for name in ("versions", "log_probs")),
            strict=True,
        )
        for (request, attempt, _, state), token_ids, mask, versions, log_probs in parts:
            episode = self.episode(request)
            episode.attempt, episode.state = attempt, STATES[state]
            episode.token_ids, episode.is_sampled = token_ids.tolist(), mask.tolist()
            episode.versions, episode.log_probs = versions.tolist(), log_probs.tolist()
        played = bytes(tensors["played"].tolist()) if "played" in tensors else b"{}"
        for request, record in records_from_json(played).items():
            episode = self.episode(request)
            episode.played, episode.failure, episode.opening = list(record.turns), record.failure, record.opening
            episode.prompt_ids, episode.starts = record.prompt_ids or episode.prompt_ids, list(record.starts)
            episode.num_retries = record.num_retries

    def _load_moved(self, moved: torch.Tensor, prompts_of: PromptsOf | None) -> None:
        if prompts_of is None:
            raise ValueError("prompts changed their order, and nothing identifies them")
        numbers, indices, samples, salts = moved.T
        prompts = prompts_of(indices.tolist())
        prompts.sample = samples
        for step in sorted({number // self.batch_rows + 1 for number in numbers.tolist()}):
            batch, here = self._batches[step], numbers // self.batch_rows + 1 == step
            places = numbers[here] - (step - 1) * self.batch_rows
            rows = torch.arange(len(batch.prompts))
            rows[places] = len(rows) + torch.arange(len(places))
            uid, salt = batch.prompts.uid, salts[here].tolist()
            own = prompts[here.nonzero()[:, 0]]
            batch.prompts = replace(Prompts.joined([batch.prompts, own])[rows], uid=uid)
            sampling = batch.episodes[0].sampling
            for at, (place, episode) in enumerate(zip(places.tolist(), new_episodes(own, sampling), strict=True)):
                batch.episodes[place] = replace(episode, sampling=replace(sampling, salt=salt[at]))
        self._moved |= set(numbers.tolist())

    def _kept(self, after_step: int) -> dict[int, Episode]:
        return {
            (step - 1) * self.batch_rows + row: episode
            for step, batch in sorted(self._batches.items())
            if step > after_step
            for row, episode in enumerate(batch.episodes)
            if episode.token_ids or episode.attempt or episode.finish or episode.opening
        }

    def _rows(self, episodes: list[Episode]) -> Batch:
        return rows_of(episodes, self._with_versions, self.has_turns)


def new_episodes(prompts: Prompts | None, sampling: Sampling) -> list[Episode]:
    """An episode for each row of prompts."""
    if prompts is None:
        return []
    columns = (prompts.index.tolist(), prompts.sample.tolist(), prompts.prompt_ids.unbind())
    texts: Sequence[Conversation | None] = prompts.raw_prompt or [None] * len(prompts)
    tasks = (prompts.data_source, prompts.ground_truth, prompts.extra_info, texts)
    names = ("index", "sample", "data_source", "ground_truth", "extra_info", "prompt")
    return [
        Episode(tuple(ids.tolist()), dict(zip(names, (index, sample, *task), strict=True)), sampling)
        for index, sample, ids, *task in zip(*columns, *tasks, strict=True)
    ]


def begun_prompts(prompts: Prompts, episodes: Sequence[Episode]) -> Prompts:
    """Return the prompts as their episodes have begun, by an environment or with the dataset's."""
    openings = [episode.opening for episode in episodes]
    if not any(isinstance(opening, Opening) for opening in openings):
        return prompts
    texts = (
        None
        if prompts.raw_prompt is None
        else [
            list(opening.messages) if isinstance(opening, Opening) else text
            for opening, text in zip(openings, prompts.raw_prompt, strict=True)
        ]
    )
    prompt_ids = ragged([torch.tensor(episode.prompt_ids, dtype=torch.int64) for episode in episodes])
    return replace(prompts, prompt_ids=prompt_ids, raw_prompt=texts)


def start_of(request: int, episode: Episode, seed_of: SeedOf, earlier: tuple[bytes, ...] = ()) -> Start:
    """The message with which a replica begins an episode or continues it."""
    row, sampling = episode.row, episode.sampling
    seed = seed_of(sampling.salt, row["index"], row["sample"], episode.attempt, len(episode.token_ids))
    return Start(request, episode.context_ids, seed, episode.room, sampling, earlier)
