"""Names that other programs and data sets have for the same thing: they are suggested before names of like spelling."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.config.keys import ACTOR, CRITIC, KEYS, REF
from megatron_rl.config.other_words import OTHER_WORDS, OtherWord
from megatron_rl.config.problems import like_name

FOLLOWERS = (CRITIC, REF, "reward_model")
"""Roles that have keys of the actor's names."""
WORDS: dict[str, OtherWord] = {}
"""The last part of a key of another program -> what it means."""
for _meaning in OTHER_WORDS:
    for _word in _meaning.all_words:
        WORDS.setdefault(_word, _meaning)
OWN_WORDS = frozenset(key.rpartition(".")[2] for key in KEYS)

PROMPTS = ("prompt", "question", "problem", "query", "instruction", "messages", "conversations", "input")
SOURCES = ("data_source", "source", "dataset", "dataset_name", "subset", "task")
TRUTHS = (
    *("ground_truth", "answer", "final_answer", "expected_answer", "solution", "target", "label", "gold", "output"),
    *("completion", "response"),
)
"""Names of columns with the prompt, with where a row is from, and with the expected answer, the surest first."""
ANSWERS = (
    *("answer", "answers", "solution", "solutions", "response", "responses", "completion", "output", "ground_truth"),
    *("label", "labels", "target", "gold", "chosen", "rejected", "reward_model", "final_answer", "expected_answer"),
)
"""Names of columns that nobody should be told to take for prompts."""


def meaning_of(key: str) -> OtherWord | None:
    """Return what a key of another program means; None for a key that none of them has.

    Programs write words with `-` on their command lines, and with `--` before.
    """
    return WORDS.get(key.rpartition(".")[2].lstrip("-").replace("-", "_"))


def suggested_key(key: str) -> str | None:
    """Return the key here that an unknown key means: by its word, or as a slip of spelling; None for neither.

    Where a critic or a reference is not named, the actor's key is meant.
    """
    group, _, word = key.rpartition(".")
    meaning, like = meaning_of(key), like_name(key, KEYS)
    if meaning is not None and not (group and like is not None and word in OWN_WORDS):
        return None if meaning.key is None else _within(group, meaning.key)
    role = next((role for role in FOLLOWERS if like is not None and like.startswith(f"{role}.")), None)
    if like is None or role is None or like_name(role.rpartition(".")[2], key.split(".")) is not None:
        return like
    rest = like.removeprefix(f"{role}.")
    return next((one for one in (f"{ACTOR}.{rest}", f"actor_rollout_ref.{rest}") if one in KEYS), like)


def _within(group: str, meant: str) -> str:
    """The key that is meant in a group that the user named: the critic's, where the critic is named."""
    of_group = f"{group}.{meant.rpartition('.')[2]}"
    return of_group if of_group in KEYS else meant


def key_note(key: str) -> str:
    """Return what another program's key means here where that differs, or what to do instead; "" for nothing."""
    meaning = meaning_of(key)
    return "" if meaning is None else meaning.note


def suggested_column(wanted: str, usual: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the column that is meant by one that a file does not have: one with a usual name, or a slip of spelling.

    A column whose name says that it holds responses is taken for nothing else. None where none is.
    """
    others = [name for name in names if name.lower() not in ANSWERS or name.lower() in usual]
    by_name = {name.lower(): name for name in others}
    return next((by_name[name] for name in usual if name in by_name), None) or like_name(wanted, others)
