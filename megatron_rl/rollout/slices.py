"""Messages between the controller and a rollout replica for generation in slices.

A slice is a counted number of engine steps. Requests start and stop and weights change only between slices. The
controller owns every request: its tokens so far and their versions. A replica only knows which requests are unfinished
in its engine. To recompute keys and values, to move a request or to continue after a restart therefore all work alike:
drop the request, and start it again with its tokens as the end of its prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from megatron_rl.images import ImagePiece
from megatron_rl.records import Sampling, Stored, ragged_from_lengths
from megatron_rl.remote_columns import ColumnPiece

FINISHED_BY_STOP, FINISHED_BY_LENGTH = "stop", "length"
"""Why a response ended: with an end token, or at its maximum length. "" before its end."""


class ImageInput(NamedTuple):
    """An image of a request: the place of its placeholders, and their features.

    features: [piece.num_tokens, H * (1 + D)] in the model's dtype; D: deepstack levels. tower: which weights have made
    them, of a tower that is trained.
    """

    piece: ImagePiece
    features: ColumnPiece
    tower: int = 0

    @property
    def key(self) -> str:
        """Equal for equal features: an image that another tower has read is another one to an engine."""
        return f"{self.piece.digest} {self.tower}" if self.tower else self.piece.digest


@dataclass(frozen=True)
class Start:
    """A request that a replica begins.

    request: its number, unique in the run. token_ids: the prompt and the response's tokens so far. seed: of new tokens.
    max_tokens: how many it may generate. earlier: responses of former epochs to the same prompt, for draft tokens, the
    oldest first; each is the prompt's last tokens and all that came after, int32 as bytes. experts_from: the number of
    its first tokens whose experts the controller has, so that only those of later ones are returned; None: of none.
    images: of token_ids, in the order of their placeholders. slot: its adapter, where the engine has several.
    """

    request: int
    token_ids: tuple[int, ...]
    seed: int
    max_tokens: int
    sampling: Sampling
    earlier: tuple[bytes, ...] = ()
    experts_from: int | None = None
    images: tuple[ImageInput, ...] = ()
    slot: int = 0

    @property
    def prompt_key(self) -> tuple[object, ...]:
        """The tokens of the prompt, the digests of its images and its slot: equal for two requests that read the same
        prompt alike.
        """
        return self.token_ids, tuple(image.key for image in self.images), self.slot


@dataclass(frozen=True)
class Slice:
    """Next actions of one replica: take weights, drop requests, start requests, then step its engine.

    version: of the weights, in training steps; the replica has received them. num_steps: engine steps at most; a slice
    ends earlier if nothing is left to generate. None: until nothing is left. keeps_prefixes: an engine without requests
    does not forget the keys and values that it has of this version.
    """

    version: int
    num_steps: int | None
    starts: tuple[Start, ...] = ()
    drops: tuple[int, ...] = ()
    keeps_prefixes: bool = False


class DraftCounts(NamedTuple):
    """Counts of requests generated with draft tokens: their tokens, the engine steps that generated some, and the
    tokens drafted.

    A request with t tokens in s steps had t - s draft tokens right: every step generates one token more than it
    accepts.
    """

    num_tokens: int = 0
    num_steps: int = 0
    num_drafted: int = 0

    def plus(self, other: DraftCounts) -> DraftCounts:
        """The counts of both."""
        return DraftCounts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Drawn:
    """Additions of one slice to a request.

    token_ids, log_probs: the new tokens, and the engine's log-prob of each. finish: why the response ended; "" if it
    has not. experts: router choices uint8 or int16 [T, layers, K] of the tokens that the engine has read since the
    slice before, or since `Start.experts_from`: up to the last token but one, which the new last one follows. drafts:
    None without speculative decoding.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: str = ""
    experts: ColumnPiece | None = None
    drafts: DraftCounts | None = None


@dataclass(frozen=True)
class SliceReport:
    """The result of a slice on one replica: engine steps, and the new tokens of each request that has any.

    version: of the replica's weights; -1 before the first. start, stop: seconds since the epoch. swap_seconds: the part
    of them for taking the slice's weights, including the wait for them.
    broken: the reason, if the transfer of the slice's weights broke. The slice did not begin then: nothing was dropped,
    started or generated, and the replica keeps its version.
    cache_usage: the largest share of the KV cache that the slice's requests took.
    """

    replica: int
    version: int
    num_steps: int
    drawn: dict[int, Drawn] = field(default_factory=dict)
    start: float = 0.0
    stop: float = 0.0
    swap_seconds: float = 0.0
    broken: str = ""
    cache_usage: float = 0.0

    def with_held(self, hold: Callable[[torch.Tensor], Stored]) -> SliceReport:
        """Return the report with the experts of all responses held together (`remote_columns.HasColumns`)."""
        here = {request: new.experts.part for request, new in self.drawn.items() if new.experts is not None}
        experts = {request: part for request, part in here.items() if isinstance(part, torch.Tensor)}
        if not experts:
            return self
        lengths = torch.tensor([len(rows) for rows in experts.values()])
        column = hold(ragged_from_lengths(torch.cat([*experts.values()]), lengths))
        if isinstance(column, torch.Tensor):
            return self
        pieces = zip(experts, column.pieces(), strict=True)
        held = {request: replace(self.drawn[request], experts=piece) for request, piece in pieces}
        return replace(self, drawn=self.drawn | held)


def largest_cache_usage(reports: Iterable[SliceReport]) -> dict[str, float]:
    """The metric of the fullest KV cache of some slices; none without a slice."""
    usages = [report.cache_usage for report in reports]
    return {"perf/kv_cache_usage": max(usages)} if usages else {}
