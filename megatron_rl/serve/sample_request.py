"""Read and check a request for samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_rl.serve import request_values
from megatron_rl.serve.bad_request import BadRequest, shown
from megatron_rl.serve.client_commands import SampleTokens
from megatron_rl.serve.request_values import ServedModel

MOST_TOP, MOST_STOPS, MOST_CHARACTERS = 100, 16, 256
"""Likeliest tokens in a place of a prompt; texts and tokens that end a sequence, and characters of one."""
StopToken = Callable[[str], int | None]
"""The token that is a text, if one is."""


def read_sample(
    values: Mapping[str, Any], weights: str, usual_seed: int, served: ServedModel, stop_token: StopToken
) -> SampleTokens:
    """The command of a request. weights: the copy that samples. usual_seed: the default seed."""
    for name in ("topk_sample_logprobs", "prompt_alt_tokens_k"):
        if values.get(name):
            raise BadRequest(name, f"{shown(values[name])} is not served; try: 0")
    for name in ("target_prompt_logprobs", "prompt_logprobs_last_n"):
        if values.get(name) is not None:
            raise BadRequest(name, f"{shown(values[name])} is not served; try: null")
    prompt, params = read_prompt(values.get("prompt"), served), values.get("sampling_params")
    if not isinstance(params, dict):
        raise BadRequest("sampling_params", f"{shown(params)} are no parameters")
    room = served.longest - len(prompt)
    if room < 1:
        raise BadRequest("prompt", f"{len(prompt)} tokens leave no room for another in the {served.longest} of a row")
    stop, texts = read_stops(params.get("stop"), served, stop_token)
    return SampleTokens(
        weights,
        prompt,
        request_values.whole(values, "num_samples", 1, request_values.MOST_SAMPLES, 1),
        request_values.whole(params, "max_tokens", 1, room, room),
        request_values.number(params, "temperature", 0.0, 100.0, 1.0),
        request_values.number(params, "top_p", 1e-6, 1.0, 1.0),
        request_values.whole(params, "top_k", -1, served.num_tokens, -1),
        request_values.whole(params, "seed", -(1 << 63), (1 << 63) - 1, usual_seed),
        stop,
        request_values.flag(values, "prompt_logprobs"),
        request_values.whole(values, "topk_prompt_logprobs", 0, min(MOST_TOP, served.num_tokens), 0),
        texts,
    )


def read_prompt(prompt: Any, served: ServedModel) -> tuple[int, ...]:
    """Tokens of all chunks of a prompt."""
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    if not isinstance(chunks, list):
        raise BadRequest("prompt.chunks", f"{shown(chunks)} is no list")
    ids: list[Any] = []
    for place, chunk in enumerate(chunks):
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else None
        if kind != "encoded_text" or not isinstance(chunk.get("tokens"), list):
            raise BadRequest(f"prompt.chunks[{place}]", f"{shown(kind)} is not served; try: encoded_text")
        ids += chunk["tokens"]
    token_ids = request_values.tokens("prompt", ids, served)
    if not token_ids:
        raise BadRequest("prompt", "it has no token; try: one")
    return token_ids


def read_stops(stop: Any, served: ServedModel, stop_token: StopToken) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """(tokens that end a sequence; None: the model's end tokens), (texts that do)."""
    if stop is None:
        return None, ()
    given = stop if isinstance(stop, list) else [stop]
    if len(given) > MOST_STOPS:
        raise BadRequest("sampling_params.stop", f"{len(given)} stops are too many; try: {MOST_STOPS}")
    stop_ids, texts = list[int](), list[str]()
    for place, one in enumerate(given):
        token = stop_token(one) if isinstance(one, str) else one
        if isinstance(one, str):
            if not 0 < len(one) <= MOST_CHARACTERS:
                rule = f"{shown(one)} has {len(one)} characters; try: 1 to {MOST_CHARACTERS}"
                raise BadRequest(f"sampling_params.stop[{place}]", rule)
            texts.append(one)
        if token is not None:
            stop_ids += request_values.tokens(f"sampling_params.stop[{place}]", [token], served)
    return tuple(stop_ids), tuple(texts)


def cut_at(texts: Sequence[str], token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int | None:
    """Return the number of tokens until one of the texts is complete; None: it never is."""
    if not any(text in decode(token_ids) for text in texts):
        return None
    return next(
        number for number in range(1, len(token_ids) + 1) if any(text in decode(token_ids[:number]) for text in texts)
    )
