"""The tokens that end a response: one list for whatever generates, learns, reads or exports responses.

As in vLLM's server a response ends at the tokenizer's end token, and at each `eos_token_id` of generation_config.json,
or of config.json where there is no such file. Files of one folder may name different tokens: a line says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megatron_rl.checkpoint.hf_config import language_config, read_tokenizer
from megatron_rl.checkpoint.identity import TOKENIZER_FILES, end_tokens
from megatron_rl.config.json_files import read_json_object

GENERATION = "generation_config.json"
SCORE_AT_END = "score_at_end_token"
"""A key of config.json, which exports of reward models have: the score is the one at the token that ends a response."""


@dataclass(frozen=True)
class EndTokens:
    """declared: of generation_config.json or config.json. own: the tokenizer's; None: it has none."""

    declared: tuple[int, ...]
    own: int | None

    @classmethod
    def of(cls, path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> EndTokens:
        """Read a model folder. tokenizer: of the folder; None: it is loaded, if the folder has one."""
        folder = Path(path)
        tokenizer = tokenizer_in(folder) if tokenizer is None else tokenizer
        declared = end_tokens(folder, language_config(folder).to_dict())
        own = None if tokenizer is None else tokenizer.eos_token_id
        return cls(tuple(declared or ()), None if own is None else int(own))

    @property
    def ids(self) -> list[int]:
        """All of them, in ascending order."""
        return sorted({*self.declared, *(() if self.own is None else (self.own,))})

    @property
    def disagree(self) -> bool:
        """Whether generation_config.json does not have the tokenizer's end token."""
        return self.own is not None and bool(self.declared) and self.own not in self.declared


def tokenizer_in(folder: Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a folder, which the driver has loaded before; None where it has none."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    return read_tokenizer(folder)


def write_generation_config(source: Path, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Write the generation_config.json of a folder that is made from another one. It names every token that ends a
    response, so that whatever reads the folder stops where training did. tokenizer: of the source.
    """
    ends, given = EndTokens.of(source, tokenizer), source / GENERATION
    if set(ends.ids) == set(ends.declared):
        if given.exists():
            (folder / GENERATION).write_bytes(given.read_bytes())
        return
    if given.exists():
        content = read_json_object(given)
    else:
        settings = language_config(source).to_dict()
        content = {name: settings[name] for name in ("bos_token_id", "pad_token_id") if settings.get(name) is not None}
    (folder / GENERATION).write_text(json.dumps({**content, "eos_token_id": ends.ids}, indent=2) + "\n")
