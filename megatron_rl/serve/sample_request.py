"""Read and check a request for samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl.serve import request_values
from megatron_rl.serve.bad_request import BadRequest, shown
from megatron_rl.serve.client_commands import SampleTokens
from megatron_rl.serve.request_values import ServedModel

StopToken = Callable[[str], int | None]
"""The token that is a text, if one is."""


def read_sample(
    values: Mapping[str, Any], weights: str, usual_seed: int, served: ServedModel, stop_token: StopToken
) -> SampleTokens:
    """The command of a request. weights: the copy that samples. usual_seed: the default seed."""
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
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
    return SampleTokens(
        weights,
        prompt,
        request_values.whole(values, "num_samples", 1, request_values.MOST_SAMPLES, 1),
        request_values.whole(params, "max_tokens", 1, room, room),
        request_values.number(params, "temperature", 0.0, 100.0, 1.0),
        request_values.number(params, "top_p", 1e-6, 1.0, 1.0),
        request_values.whole(params, "top_k", -1, served.num_tokens, -1),
        request_values.whole(params, "seed", -(1 << 63), (1 << 63) - 1, usual_seed),
        read_stops(params.get("stop"), served, stop_token),
        request_values.flag(values, "prompt_logprobs"),
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
    found = request_values.tokens("prompt", ids, served)
    if not found:
        raise BadRequest("prompt", "it has no token; try: one")
    return found


def read_stops(stop: Any, served: ServedModel, stop_token: StopToken) -> tuple[int, ...] | None:
    """Tokens that end a sequence; None: the model's end tokens."""
    if stop is None:
        return None
    found = list[int]()
    for place, one in enumerate([stop] if isinstance(stop, str) else stop if isinstance(stop, list) else [stop]):
        token = stop_token(one) if isinstance(one, str) else one
        if token is None:
            rule = f"{shown(one)} is not one token of the model, and longer texts are not served"
            raise BadRequest(f"sampling_params.stop[{place}]", f"{rule}; try: ids of tokens")
        found += request_values.tokens(f"sampling_params.stop[{place}]", [token], served)
    return tuple(found)
