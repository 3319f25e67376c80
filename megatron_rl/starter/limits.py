"""How long prompts and responses of a user's own data may be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_rl.config.json_files import UnreadableFileError, read_json_object
from megatron_rl.errors import ConfigError
from megatron_rl.starter.expected_answers import BUILT_IN_MATH, EXACT, MATH
from megatron_rl.starter.own_data import OwnData, PromptLengths, longest_truth

STEP = 16
"""Limits are multiples of that many tokens."""
MOST_PROMPT_TOKENS = 2048
"""A few longer prompts are left out, because each rank has room for the longest one that is allowed."""
RESPONSE_TOKENS = {MATH: (16, 128, 1024), BUILT_IN_MATH: (16, 128, 1024), "score": (16, 64, 512)}
"""Kind -> tokens of a response: of the tiny model, of another one on a CPU, on GPUs."""


def limits_of(
    own: OwnData, lengths: PromptLengths, model: Path, name: str, num_gpus: int, is_tiny: bool
) -> tuple[OwnData, tuple[int, int], str]:
    """Return the data, tokens of the longest prompt and response, and a sentence about prompts that are left out.

    A response has room for the longest expected answer and a token that ends it, but at most half of the model's
    longest sequence. Raises ConfigError for a model that cannot be read.
    """
    positions = _positions(model)
    response = 0 if own.keys.ground_truth_key is None else _rounded(longest_truth(own, model) + 1)
    if name != EXACT:
        usual, most_response = RESPONSE_TOKENS[name][0 if is_tiny else 2 if num_gpus else 1], RESPONSE_TOKENS[name][2]
        response = max(usual, min(response, most_response))
    response = max(1, min(response, positions // 2))
    most = min(MOST_PROMPT_TOKENS, positions - response)
    prompt = min(_rounded(lengths.longest), most)
    if lengths.longest <= prompt:
        return own, (prompt, response), ""
    line = f"prompts of more than {prompt} tokens are left out (data.filter_overlong_prompts); the longest has "
    keys = replace(own.keys, filter_overlong_prompts=True)
    return replace(own, keys=keys), (prompt, response), f"{line}{lengths.longest}"


def _rounded(tokens: int) -> int:
    return -(-tokens // STEP) * STEP


def _positions(model: Path) -> int:
    """Tokens of the longest sequence of a model; of one whose config.json does not have it, any number."""
    try:
        settings = read_json_object(model / "config.json")
    except UnreadableFileError as error:
        raise ConfigError(f"{model} cannot be read: {error}") from error
    positions = settings.get("max_position_embeddings")
    return positions if isinstance(positions, int) else 1 << 30
