"""Guess a request's next tokens: what followed where its last tokens stood before, in earlier responses and in
itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

BETWEEN = -1
"""Stands between two responses; no token is."""

MOST = 64
"""Places that are counted, at most: their number squared is what a draft token costs."""


def joined(answers: Sequence[bytes]) -> Tokens:
    """Return responses, each int32 as bytes, as one array with `BETWEEN` behind each."""
    parts = [np.append(np.frombuffer(answer, dtype=np.int32), np.int32(BETWEEN)) for answer in answers]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def guess(own: Tokens, earlier: Tokens, least: int, most: int, num_tokens: int) -> list[int]:
    """Return `num_tokens` tokens that may follow `own`, fewer at the end of earlier responses; none without a match.

    own: the tokens of the request. earlier: of `joined`, the oldest response first. least, most: how many of the last
    tokens must stand at a place, and how many are compared. Of the places with the longest match (the last `MOST`),
    those stay that continue as most of them do, token after token; of equally many, those with the last place.
    """
    text = np.concatenate((earlier, own, np.empty(num_tokens, dtype=np.int32)))
    guessed: list[int] = compiled(text, len(earlier), len(own), least, most, num_tokens).tolist()
    return guessed


def _search(text: Any, start: int, length: int, least: int, most: int, num_tokens: int) -> Any:  # pragma: no cover
    """text: earlier responses, the request from `start` on, and room for the draft tokens, which are written there."""
    end = start + length
    if length < least:
        return text[end:end]
    most = min(most, length)
    places = np.empty(MOST, dtype=np.int64)
    num_places, longest = 0, least
    for place in range(end - 1, 0, -1):
        if text[place] == BETWEEN:
            continue
        same = 0
        while same < most and same < place and text[place - 1 - same] == text[end - 1 - same]:
            same += 1
        if same > longest:
            num_places, longest = 0, same
        if same == longest and num_places < MOST:
            places[num_places] = place
            num_places += 1
    for number in range(num_tokens):
        # A place near the end continues with what was drafted, so what repeats is drafted on and on.
        best, most_often = BETWEEN, 0
        for mine in range(num_places):
            token, often = text[places[mine] + number], 0
            for other in range(num_places):
                often += text[places[other] + number] == token
            if token != BETWEEN and often > most_often:
                best, most_often = token, often
        if most_often == 0:
            return text[end : end + number]
        text[end + number] = best
        num_kept = 0
        for mine in range(num_places):
            if text[places[mine] + number] == best:
                places[num_kept] = places[mine]
                num_kept += 1
        num_places = num_kept
    return text[end : end + num_tokens]


compiled: Any = njit(_search)
