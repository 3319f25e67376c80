"""The search for guesses beside one that looks at every place of every answer."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rollout.draft_search import MOST, guess, joined

TEXTS = st.lists(st.integers(0, 3), max_size=14)


def as_tokens(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def guessed(own, answers, least: int, most: int, num_tokens: int) -> list[int]:
    return guess(as_tokens(own), joined([as_tokens(answer).tobytes() for answer in answers]), least, most, num_tokens)


def slowly(own, answers, least: int, most: int, num_tokens: int) -> list[int]:
    """Matches are counted at every place, and tokens that follow are compared one by one."""
    texts, longest, places = [*map(list, answers), list(own)], least, []
    for number, text in enumerate(texts):
        for place in range(1, len(text)):
            same = next(
                (n for n in range(most) if n >= min(place, len(own)) or text[place - 1 - n] != own[-1 - n]), most
            )
            if same > longest:
                longest, places = same, []
            if same == longest:
                places.append((number, place))
    new: list[int] = []
    while len(new) < num_tokens:
        places = [(number, place) for number, place in places if place + len(new) < len(texts[number])]
        following = [texts[number][place + len(new)] for number, place in places]
        if not following:
            break
        newest = {token: at for at, token in enumerate(following)}
        token = max(newest, key=lambda token: (following.count(token), newest[token]))
        places = [place for place, other in zip(places, following, strict=True) if other == token]
        new.append(token)
        texts[-1].append(token)
    return new


@settings(max_examples=400, deadline=None)
@given(TEXTS, st.lists(TEXTS, max_size=3), st.integers(1, 3), st.integers(0, 3), st.integers(1, 6))
def test_the_search_finds_what_a_slow_one_finds(own, answers, least, more, num_tokens):
    """Would not catch how often the model draws what is guessed; whole runs count that."""
    assert guessed(own, answers, least, least + more, num_tokens) == slowly(
        own, answers, least, least + more, num_tokens
    )


def test_guesses_by_hand():
    """An answer begins as two of three did; a new one goes on as the request itself; nothing matches; what repeats is
    guessed on and on.

    Would not catch matches over the border of two answers: the slow search does.
    """
    prompt, answers = [7, 8, 9], [[8, 9, 1, 2, 3], [8, 9, 1, 2, 4, 5], [8, 9, 1, 6]]
    assert guessed([*prompt, 1], answers, 2, 4, 3) == [2, 4, 5]
    assert guessed([*prompt, 1, 2, 3], answers, 2, 4, 3) == []
    assert guessed([*prompt, 0, 5, 6, 0, 5], answers, 2, 4, 3) == [6, 0, 5]
    assert guessed([*prompt, 5], answers, 2, 4, 3) == []
    assert guessed([1, 1, 1], [], 2, 4, 5) == [1] * 5


def test_the_last_places_are_counted():
    """Of many places with an equal match, those at the end. Would not catch another number of them that is as good."""
    earlier = [[5, 1]] * MOST + [[5, 2]] * MOST
    assert guessed([9, 5], earlier, 1, 2, 1) == [2]
