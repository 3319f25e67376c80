"""Which ids of a vocabulary are tokens: config.json may have more rows than the tokenizer has tokens, as padding.

Nobody can read such an id: the text of a response does not have it, and other models with this tokenizer may have no
row for it. So no engine samples one, and the trainer's distribution is that over the tokens, too.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from megatron_rl.checkpoint.end_tokens import tokenizer_in
from megatron_rl.config.schema import RunConfig


@lru_cache(maxsize=8)  # several roles of a rank ask, and a large tokenizer takes a second
def _num_tokens(path: str) -> int | None:
    tokenizer = tokenizer_in(Path(path))
    return None if tokenizer is None else max(tokenizer.get_vocab().values(), default=-1) + 1


def num_sampled_tokens(config: RunConfig, path: str | Path, vocab_size: int) -> int:
    """Return how many of the first ids of a vocabulary may be sampled: all up to the tokenizer's last token.

    path: of the policy's folder. vocab_size: of its config.json, which is returned where the folder has no tokenizer,
    and for tasks that do not sample: they compute what transformers computes.
    """
    num_tokens = _num_tokens(str(path)) if config.generates else None
    return vocab_size if num_tokens is None else min(num_tokens, vocab_size)
