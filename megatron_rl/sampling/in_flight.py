"""The episodes that are not trained yet: prompt, tokens so far, and log-prob and version of each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_rl.agents.as_json import EpisodeRecord, records_as_json, records_from_json
from megatron_rl.agents.episode import (
    STATES,
    Episode,
    EpisodeLimits,
    Reply,
    context_images,
    prompt_images,
    rows_of,
    turn_room,
)
from megatron_rl.agents.observation import Opening
from megatron_rl.images import Pieces
from megatron_rl.records import Batch, Conversation, Sampling, ragged_of_pieces, row_lengths
from megatron_rl.remote_columns import ColumnPiece
from megatron_rl.rollout.slices import DraftCounts, Drawn, ImageInput, Start
from megatron_rl.sampling.group_map import GroupMap, requests_of_groups
from megatron_rl.sampling.image_tensors import TurnImages, encoded_of_tensors, images_as_tensors, pieces_of_tensors

SeedOf = Callable[[int, int, int, int, int], int]
"""(salt, prompt index, sample, attempt, number of tokens after the prompt) -> seed."""
EarlierOf = Callable[[int, int], tuple[bytes, ...]]
"""(prompt index, batch) -> earlier responses to this prompt, which requests of this batch name: see `Start.earlier`."""


PromptsOf = Callable[[Sequence[int]], Batch]
"""Rows over all files -> their prompts."""
ImagesOf = Callable[[Pieces], tuple[ImageInput, ...]]
"""Images of a prompt -> those of its request: see `Start.images`."""
TASK_COLUMNS = ("index", "sample", "data_source", "ground_truth", "extra_info")
"""Columns of prompts that are entries of `Episode.row`, too."""


class InFlightBatches:
    """The prompts and episodes of requests that are not trained, by request; `groups` has the batch of each.

    All batches begin with the same number of rows; greedy responses are the last ones of their groups, or of the batch
    where each request is a group. has_turns: whether a turn that ends gets a reply.
    """

    def __init__(
        self,
        batch_rows: int,
        seed_of: SeedOf,
        with_versions: bool = True,
        limits: EpisodeLimits | None = None,
        earlier_of: EarlierOf = lambda index, batch: (),
        groups: GroupMap | None = None,
        images_of: ImagesOf = lambda pieces: (),
        shown: TurnImages | None = None,
        hears_cut: Callable[[int], bool] = lambda request: False,
    ) -> None:
        """with_versions: of tokens; False where all of a batch are of the newest weights. shown: the images of turns;
        None: turns are text.

        limits: of episodes; None: nothing answers a turn, and the first one is the last. hears_cut: whether the
        environment of a request hears that it is cut off. groups: None: each request is
        a group, which stays in its batch.
        """
        self.batch_rows, self._seed_of, self._with_versions = batch_rows, seed_of, with_versions
        self._earlier_of, self._limits, self._images_of, self.shown = earlier_of, limits, images_of, shown
        self.has_turns, self._hears_cut = limits is not None, hears_cut
        self.groups = GroupMap(batch_rows) if groups is None else groups
        self._episodes: dict[int, Episode] = {}
        self._compared: set[int] = set()
        self._drafts: dict[int, DraftCounts] = {}
        self._greedily: Sampling | None = None

    def add(self, step: int, prompts: Batch, sampling: Sampling, greedy: Batch | None, greedily: Sampling) -> None:
        """Begin a batch. Raises ValueError if its number of rows is not batch_rows."""
        episodes = [new for rows, how in ((prompts, sampling), (greedy, greedily)) for new in new_episodes(rows, how)]
        if len(episodes) != self.batch_rows:
            raise ValueError(f"a batch has {self.batch_rows} requests, this one of step {step} {len(episodes)}")
        numbers = list(range((step - 1) * self.batch_rows, step * self.batch_rows))
        if greedy is not None:
            self._greedily = greedily
            numbers.sort(key=self._is_greedy)
        self._episodes |= zip(numbers, episodes, strict=True)
        self._compared.update(numbers[len(prompts) :])
        note_groups(episodes, prompts, numbers)

    def _is_greedy(self, request: int) -> bool:
        """Whether the request is a group's greedy response, which is the last of its group if groups have several."""
        size = self.groups.group_size
        return self._greedily is not None and size > 1 and request % size == size - 1

    def add_group(self, first: int, prompts: Batch, rows: range, sampling: Sampling) -> None:
        """Begin a group with requests from number `first` on. rows: of `prompts`. One that has begun stays as it is."""
        if first in self._episodes:
            return
        own = prompts[rows.start : rows.stop]
        episodes = new_episodes(own, sampling)
        self._episodes |= enumerate(episodes, first)
        note_groups(episodes, own, range(first, first + len(episodes)))

    def start(self, request: int) -> Start:
        """The message with which a replica begins a request or continues it."""
        episode = self.episode(request)
        earlier = self._earlier_of(episode.row["index"], self.groups.batch_of(request))
        return start_of(request, episode, self._seed_of, earlier, self._images_of)

    def extend(self, drawn: dict[int, Drawn], version: int) -> list[int]:
        """Add the tokens that a slice generated with the weights of `version`; returns requests whose turn waits for
        its reply.
        """
        for request, new in drawn.items():
            self.episode(request).extend(new, version, self.has_turns, self._hears_cut(request))
            if new.drafts is not None:
                step = self.groups.batch_of(request)
                self._drafts[step] = self.drafts(step).plus(new.drafts)
        return [request for request in drawn if self.episode(request).waits]

    def take(self, request: int, reply: Reply, is_last: bool = False) -> bool:
        """Add the reply to a turn; returns whether the request is finished. Where it hears that it is cut off, it
        waits again. is_last: it is finished, even if it has failed.
        """
        episode = self.episode(request)
        assert self._limits is not None
        limits = replace(self._limits, max_retries=0) if is_last else self._limits
        episode.take(reply, limits, self._hears_cut(request))
        return episode.finish != ""

    @property
    def away(self) -> list[int]:
        """Requests whose turn waits for its reply."""
        return [request for request, episode in self._kept(0).items() if episode.waits]

    def requests_of(self, step: int) -> tuple[list[int], list[int]]:
        """The requests of a step's rows, and those of its greedy responses; none of a batch that is not begun."""
        begun = [request for request in self.groups.requests_of(step) if request in self._episodes]
        return [request for request in begun if request not in self._compared], [
            request for request in begun if request in self._compared
        ]

    def batch(self, step: int) -> tuple[Batch, Batch | None]:
        """The rows of a step, and greedy responses or None. Raises ValueError if a response is not finished."""
        requests, greedy = self.requests_of(step)
        numbered = enumerate([*requests, *greedy])
        unfinished = [row for row, request in numbered if not self._episodes[request].finish]
        if unfinished:
            raise ValueError(f"rows {unfinished[:8]} of batch {step} are not finished")
        return self.rows(requests), self.rows(greedy) if greedy else None

    def rows(self, requests: Sequence[int]) -> Batch:
        """The rows of requests that are finished, in their order."""
        episodes = [self._episodes[request] for request in requests]
        uid = torch.tensor([episode.group[0] for episode in episodes]).unique(return_inverse=True)[1]
        return responses_of(episodes, uid, self._with_versions, self.has_turns)

    @property
    def unbegun(self) -> dict[int, Episode]:
        """Episodes that have the dataset's prompt, and no token yet."""
        return {
            request: episode
            for request, episode in sorted(self._episodes.items())
            if episode.opening is None and not (episode.token_ids or episode.finish)
        }

    def drafts(self, step: int) -> DraftCounts:
        """What drafts did for the responses of a batch, in this process; zeros without draft tokens."""
        return self._drafts.get(step, DraftCounts())

    def trained(self, step: int) -> None:
        """Drop the batches up to that of `step`."""
        batch_of = self.groups.batch_of
        self._episodes = {request: one for request, one in self._episodes.items() if batch_of(request) > step}
        self._compared &= self._episodes.keys()
        self._drafts = {begun: counts for begun, counts in self._drafts.items() if begun > step}

    def episode(self, request: int) -> Episode:
        """The episode of a request."""
        return self._episodes[request]

    def tensors(self, after_step: int) -> dict[str, torch.Tensor]:
        """The episodes of batches after a step, for a checkpoint; prompts are not among them and are read again.

        requests int64 [N, 4]: number, attempt, length, state (see `STATES`). Of all requests end to end: token_ids
        int64 and is_sampled bool [T]; of the sampled ones versions int64 and log_probs float32; where there are some,
        num_experts int64 [N] and experts, read from their nodes (see `Episode`). played uint8: what `records_as_json`
        returns. moved int64 [M, 4], of requests that began in an earlier batch: number, the prompt's row over all
        files, sample, and the salt of its seeds. Where turns show images, what `images_as_tensors` returns.
        """
        kept = self._kept(after_step)
        moved = [
            [number, e.row["index"], e.row["sample"], e.sampling.salt]
            for number, e in sorted(self._episodes.items())
            if number < after_step * self.batch_rows and self.groups.batch_of(number) > after_step
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
        pieces = [e.experts for e in episodes]
        routed = ragged_of_pieces(pieces) if any(pieces) else None
        experts = {} if routed is None else {"num_experts": row_lengths(routed), "experts": routed.values()}
        images = {} if self.shown is None else images_as_tensors(kept, self.shown)
        return (
            experts
            | images
            | {
                "played": torch.tensor(list(records_as_json(records).encode()), dtype=torch.uint8),
                "moved": torch.tensor(moved, dtype=torch.int64).reshape(-1, 4),
                "requests": torch.tensor(rows, dtype=torch.int64).reshape(-1, 4),
                "token_ids": torch.tensor([token for e in episodes for token in e.token_ids], dtype=torch.int64),
                "is_sampled": torch.tensor([value for e in episodes for value in e.is_sampled], dtype=torch.bool),
                "versions": torch.tensor([version for e in episodes for version in e.versions], dtype=torch.int64),
                "log_probs": torch.tensor([value for e in episodes for value in e.log_probs], dtype=torch.float32),
            }
        )

    def load_tensors(self, tensors: dict[str, torch.Tensor], prompts_of: PromptsOf | None = None) -> None:
        """Load what `tensors` returned; the batches must be added before. prompts_of: needed for requests that began in
        an earlier batch. Raises KeyError, TypeError, ValueError for other content.
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
        counts = tensors.get("num_experts", torch.zeros(len(lengths), dtype=torch.int64)).tolist()
        routed = tensors["experts"].split(counts) if any(counts) else [None] * len(counts)
        for request, experts in zip(tensors["requests"][:, 0].tolist(), routed, strict=True):
            self.episode(request).experts = [] if experts is None else [ColumnPiece.whole(experts)]
        played = bytes(tensors["played"].tolist()) if "played" in tensors else b"{}"
        for request, record in records_from_json(played).items():
            episode = self.episode(request)
            episode.played, episode.failure, episode.opening = list(record.turns), record.failure, record.opening
            episode.prompt_ids, episode.starts = record.prompt_ids or episode.prompt_ids, list(record.starts)
            episode.num_retries = record.num_retries
        if self.shown is not None:
            self.shown.add(encoded_of_tensors(tensors))
            for request, pieces in pieces_of_tensors(tensors).items():
                self.episode(request).images = pieces

    def _load_moved(self, moved: torch.Tensor, prompts_of: PromptsOf | None) -> None:
        if prompts_of is None:
            raise ValueError("requests began in an earlier batch, and nothing identifies their prompts")
        numbers, indices, samples, salts = moved.T
        prompts = prompts_of(indices.tolist())
        prompts.add(sample=samples)
        sampling = next(one.sampling for request, one in self._episodes.items() if request not in self._compared)
        for row, (number, salt) in enumerate(zip(numbers.tolist(), salts.tolist(), strict=True)):
            how = replace(sampling, salt=salt)
            if self._greedily is not None and self._is_greedy(number):
                how = self._greedily
                self._compared.add(number)
            self._episodes[number] = new_episodes(prompts[row : row + 1], how)[0]
            group = requests_of_groups([number // self.groups.group_size], self.groups.group_size)
            alone = how is self._greedily
            self._episodes[number].group = (
                (number,) if alone else tuple(one for one in group if not self._is_greedy(one))
            )

    def _kept(self, after_step: int) -> dict[int, Episode]:
        return {
            request: episode
            for request, episode in sorted(self._episodes.items())
            if self.groups.batch_of(request) > after_step
            and (episode.token_ids or episode.attempt or episode.finish or episode.opening)
        }


def images_in_flight(answers: InFlightBatches) -> list[Pieces]:
    """Return the images of all episodes that have some."""
    return [episode.images for episode in list(answers._episodes.values()) if episode.images]


def new_episodes(prompts: Batch | None, sampling: Sampling) -> list[Episode]:
    """An episode for each row of prompts."""
    if prompts is None:
        return []
    texts: Sequence[Conversation | None] = [None] * len(prompts)
    if "raw_prompt" in prompts:
        texts = prompts.objects("raw_prompt")
    images: Sequence[Pieces | None] = prompts.objects("images") if "images" in prompts else [None] * len(prompts)
    columns = [prompts["index"].tolist(), prompts["sample"].tolist(), *map(prompts.objects, TASK_COLUMNS[2:]), texts]
    return [
        Episode(
            tuple(ids.tolist()),
            dict(zip((*TASK_COLUMNS, "prompt"), task, strict=True)) | ({} if shown is None else {"images": shown}),
            sampling,
            images=shown,
        )
        for ids, shown, *task in zip(prompts["input_ids"].unbind(), images, *columns, strict=True)
    ]


def note_groups(episodes: Sequence[Episode], prompts: Batch, numbers: Sequence[int]) -> None:
    """Let each episode have the sampled requests of its group. numbers: its own request. Greedy episodes, which follow
    those of `prompts`, are alone.
    """
    groups: dict[int, list[int]] = {}
    for request, uid in zip(numbers, prompts["uid"].tolist(), strict=False):
        groups.setdefault(uid, []).append(request)
    for request, episode in zip(numbers, episodes, strict=True):
        episode.group = (request,)
    for uid, episode in zip(prompts["uid"].tolist(), episodes, strict=False):
        episode.group = tuple(groups[uid])


def responses_of(episodes: Sequence[Episode], uid: torch.Tensor, with_versions: bool, has_turns: bool) -> Batch:
    """Return `rows_of` episodes with the columns of their prompts, as an environment or the dataset has begun them.

    uid: int64, of each episode.
    """
    rows = rows_of(episodes, with_versions, has_turns)
    tasks: dict[str, list[Any]] = {name: [episode.row[name] for episode in episodes] for name in TASK_COLUMNS}
    rows.add(uid=uid, index=torch.tensor(tasks.pop("index")), sample=torch.tensor(tasks.pop("sample")), **tasks)
    if episodes[0].images is not None:
        rows.add(images=[prompt_images(e) if e.failure else e.images for e in episodes])
    texts = [episode.row["prompt"] for episode in episodes]
    if None not in texts:
        begun = zip((episode.opening for episode in episodes), texts, strict=True)
        rows.add(raw_prompt=[list(own.messages) if isinstance(own, Opening) else text for own, text in begun])
    return rows


def start_of(
    request: int,
    episode: Episode,
    seed_of: SeedOf,
    earlier: tuple[bytes, ...] = (),
    images_of: ImagesOf = lambda pieces: (),
) -> Start:
    """The message with which a replica begins an episode or continues it."""
    row, sampling = episode.row, episode.sampling
    seed = seed_of(sampling.salt, row["index"], row["sample"], episode.attempt, len(episode.token_ids))
    images, room = images_of(context_images(episode)), turn_room(episode)
    return Start(request, episode.context_ids, seed, room, sampling, earlier, episode.experts_from, images)
