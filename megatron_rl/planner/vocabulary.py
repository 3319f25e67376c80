"""Whether two model folders mean the same by a token number, as far as their tokenizer.json tells."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_rl.errors import Violation

FILE = "tokenizer.json"


def vocabulary_problems(actor_path: str, reward_path: str, key: str = "reward_model.model.path") -> Iterable[Violation]:
    """Why a reward model cannot read the actor's tokens; nothing where a folder has no such file, or none to read.

    key: the one that names the reward model's folder.
    """
    files = [Path(path).expanduser() / FILE for path in (actor_path, reward_path)]
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    try:
        actor, reward = (_numbers(json.loads(file.read_text())) for file in files)
    except (ValueError, TypeError, KeyError):
        return  # the model folder's own loader reports it
    different = {token for token, number in actor.items() if reward.get(token) != number}
    if different:
        example = min(different, key=lambda token: actor[token])
        yield Violation(
            {key: reward_path},
            f"must have the actor's tokens: {len(different)} of {len(actor)} have other numbers or are missing in its "
            f"{FILE}, the first is {example!r} ({actor[example]} in {actor_path}, {reward.get(example)} there)",
            hint="take a reward model that was trained from the actor's base model",
        )


def _numbers(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Token -> number, of tokenizer.json's model (a mapping, or for Unigram a list of pairs) and added tokens."""
    vocabulary: Any = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    numbers: dict[str, int] = vocabulary
    return numbers | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
