"""Split the rows of a call for the ranks and join the ranks' answers: pure functions, no processes.

    (args, kwargs) --split_call--> one payload per chunk ... one reply per chunk --join_answers--> the result

A chunk is what one data-parallel rank or one rollout replica works on; every rank of it gets the same payload.
Sizes of chunks differ by at most one row; which rows go together may be chosen by their work. A chunk without rows
still has to run, since its ranks take part in collectives: it is padded with a copy of row 0, and its reply is
dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from megatron_rl.cluster.rank_messages import Payload
from megatron_rl.columns import COLUMNS, OBJECT
from megatron_rl.dispatch import Coordinates, Dispatch, ExtraBatch
from megatron_rl.parallel.balance import SequenceWork, share_out, share_out_prompts
from megatron_rl.records import Batch, first_true, prompt_numbers, row_lengths


@dataclass(frozen=True)
class Route:
    """The ranks that run a call, the chunk of each, and the ranks whose replies count.

    chunk_of_rank: called rank -> index of its chunk. collectors: for DP and REPLICAS the answering rank of each
    chunk, in chunk order; else all called ranks.
    """

    chunk_of_rank: dict[int, int]
    collectors: tuple[int, ...]


def route_call(dispatch: Dispatch, world_size: int, coordinates: Sequence[Coordinates]) -> Route:
    """Return the route of a call under `dispatch`; `coordinates` may be empty where rows are not split.

    Raises ValueError when a chunk does not have exactly one collector, which is an error in the coordinates.
    """
    match dispatch:
        case Dispatch.RANK_ZERO:
            return Route({0: 0}, collectors=(0,))
        case Dispatch.ONE_TO_ALL:
            return Route(dict.fromkeys(range(world_size), 0), collectors=tuple(range(world_size)))
        case Dispatch.DP:
            places = [(place.rank, place.dp_rank, place.dp_collector) for place in coordinates]
            num_chunks = coordinates[0].dp_size
        case Dispatch.REPLICAS:
            places = [(place.rank, place.replica, place.replica_collector) for place in coordinates]
            num_chunks = coordinates[0].num_replicas
    collectors = sorted((chunk, rank) for rank, chunk, collects in places if collects)
    if [chunk for chunk, _ in collectors] != list(range(num_chunks)):
        raise ValueError(f"{dispatch.name} needs one collector for each of {num_chunks} chunks, got {collectors}")
    return Route({rank: chunk for rank, chunk, _ in places}, tuple(rank for _, rank in collectors))


def chunk_sizes(num_rows: int, num_chunks: int) -> list[int]:
    """Return the rows per chunk: contiguous, in order; the first `num_rows % num_chunks` chunks have one row more."""
    smaller, num_larger = divmod(num_rows, num_chunks)
    return [smaller + (chunk < num_larger) for chunk in range(num_chunks)]


@dataclass(frozen=True)
class Split:
    """One call in chunks. sizes: real rows of each chunk; None when the call has no record.

    order: the call's row numbers, chunk after chunk; None: the order of the call.
    """

    payloads: list[Payload]
    sizes: list[int] | None = None
    order: torch.Tensor | None = None


def split_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], num_chunks: int, work: SequenceWork | None = None
) -> Split:
    """Cut a call into one payload per chunk.

    Top-level arguments that are batches are split, all others go whole into every payload. With `work` chunks have
    about equal work, judged by the `input_ids` of the first record; without, rows stay in their order. A record in
    `ExtraBatch` is split in the same way by itself.
    Raises ValueError when records of one call differ in rows or have none.
    """
    records = [value for value in (*args, *kwargs.values()) if isinstance(value, Batch)]
    row_counts = [len(record) for record in records]
    if not row_counts:
        return Split([(args, kwargs)] * num_chunks)
    if len(set(row_counts)) > 1:
        raise ValueError(f"the records of one call must have the same number of rows, got {row_counts}")
    if row_counts[0] == 0:
        raise ValueError("the records of a call have no rows: there is nothing to split, nor a row to pad with")
    sizes = chunk_sizes(row_counts[0], num_chunks)
    order = _order(records[0], sizes, work)
    if order is not None:
        args = tuple(value[order] if isinstance(value, Batch) else value for value in args)
        kwargs = {name: value[order] if isinstance(value, Batch) else value for name, value in kwargs.items()}
    args = tuple(_parts_of(value, num_chunks, work) for value in args)
    kwargs = {name: _parts_of(value, num_chunks, work) for name, value in kwargs.items()}
    payloads: list[Payload] = []
    start = 0
    for number, size in enumerate(sizes):
        stop = start + size
        payloads.append(
            (
                tuple(_chunk(value, start, stop, number) for value in args),
                {name: _chunk(value, start, stop, number) for name, value in kwargs.items()},
            )
        )
        start = stop
    return Split(payloads, sizes, order)


def payloads_of_replicas(args: tuple[Any, ...], kwargs: dict[str, Any], num_chunks: int) -> list[Payload]:
    """Return the payload of each chunk of a call whose records are not split.

    With several chunks, which are rollout replicas, each gets of every dict only the entry under its number.
    """
    values = (*args, *kwargs.values())
    if num_chunks == 1 or not any(isinstance(value, dict) for value in values):
        return [(args, kwargs)] * num_chunks

    def cut(value: Any, number: int) -> Any:
        return {key: entry for key, entry in value.items() if key == number} if isinstance(value, dict) else value

    return [
        (tuple(cut(value, number) for value in args), {name: cut(value, number) for name, value in kwargs.items()})
        for number in range(num_chunks)
    ]


def _order(record: Batch, sizes: list[int], work: SequenceWork | None) -> torch.Tensor | None:
    """Return row numbers, chunk after chunk, that give chunks of these sizes about equal work; None: no reordering."""
    if work is None or len(sizes) == 1:
        return None
    lengths = row_lengths(record["image_patches" if "image_patches" in record else "input_ids"]).tolist()
    if work.by_prompt and "sampled" in record:
        prompts, before = prompt_numbers(record), first_true(record["sampled"]).tolist()
        shares = share_out_prompts(prompts, lengths, before, work, sizes)
    else:
        shares = share_out(work(lengths), [1] * len(lengths), sizes)
    assert shares is not None  # weights of one always fill the sizes
    return torch.tensor([row for part in shares for row in part])


@dataclass(frozen=True)
class _Parts:
    """An extra record of the call (`ExtraBatch`), in chunks."""

    chunks: list[Any]


def _parts_of(value: Any, num_chunks: int, work: SequenceWork | None) -> Any:
    """Split an extra record of the call; return any other value unchanged."""
    if not isinstance(value, ExtraBatch):
        return value
    record: Batch = value.record
    sizes = chunk_sizes(len(record), num_chunks)
    order = _order(record, sizes, work)
    record = record if order is None else record[order]
    stops = list(accumulate(sizes))
    return _Parts([ExtraBatch(_chunk(record, stop - size, stop)) for stop, size in zip(stops, sizes, strict=True)])


def _chunk(value: Any, start: int, stop: int, number: int = 0) -> Any:
    """Return rows `start:stop` of a record, or a padding row when there are none; the chunk `number` of `_Parts`; any
    other value unchanged.
    """
    if isinstance(value, _Parts):
        return value.chunks[number]
    if not isinstance(value, Batch):
        return value
    if objects := [name for name in value.names if COLUMNS[name].dtype == OBJECT]:
        raise ValueError(f"ranks are sent tensors alone, and this call has {', '.join(objects)}: send `read_by` of it")
    rows = value[start:stop] if start < stop else value[:1]
    return rows.neutral() if start == stop else rows


def join_answers(answers: Sequence[Any], split: Split) -> Any:
    """Join one reply per chunk into one result; replies of chunks without real rows are dropped.

    Records are concatenated, with their rows in the order of the call. Of dicts, which the ranks have reduced
    themselves, the first is returned. Tuples are joined part by part. If all replies are None, so is the result. Other
    replies become a list with one entry per chunk.
    """
    if all(type(answer) is tuple for answer in answers):
        return tuple(join_answers(part, split) for part in zip(*answers, strict=True))
    real = [answer for chunk, answer in enumerate(answers) if split.sizes is None or split.sizes[chunk] > 0]
    if all(answer is None for answer in real):
        return None
    if all(isinstance(answer, Batch) for answer in real):
        joined = Batch.joined(real)
        return joined if split.order is None else joined[split.order.argsort()]
    if all(isinstance(answer, dict) for answer in real):
        return real[0]
    return real
