"""The Tinker API's messages in Protocol Buffers (SDK 0.38): numbers of fields, and tensors in them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.serve.bad_request import BadRequest, shown
from megatron_rl.serve.protobuf import BYTES, DOUBLE, INT, TEXT, Field, Table, map_of

FLOAT32, INT64, INT32 = 1, 2, 3
"""Numbers of dtypes; 4 is bfloat16, which clients do not send."""
_ITEMS = {FLOAT32: "f", INT64: "q", INT32: "i"}

SPARSE: Table = {1: Field("values", BYTES)}
TENSOR: Table = {
    1: Field("dense", BYTES),
    2: Field("sparse_csr", SPARSE),
    3: Field("dtype", INT),
    4: Field("shape", INT, is_list=True),
}
CHUNK: Table = {
    1: Field("encoded_text", {1: Field("tokens", BYTES)}),
    2: Field("image", {2: Field("format", TEXT)}),
    3: Field("dmel", {}),
}
DATUM: Table = {1: Field("model_input", CHUNK, is_list=True), 2: map_of("loss_fn_inputs", TENSOR)}
FORWARD_BACKWARD: Table = {
    1: Field("model_id", TEXT),
    2: Field("seq_id", INT),
    3: Field("data", DATUM, is_list=True),
    4: Field("loss_fn", TEXT),
    5: map_of("loss_fn_config", DOUBLE),
    6: Field("forward_only", INT),
    7: map_of("loss_fn_config_v2", {1: Field("number", DOUBLE), 2: Field("text", TEXT)}),
}
BATCHED_TENSOR: Table = {1: Field("data", BYTES), 2: Field("offsets", BYTES), 3: Field("dtype", INT)}
FORWARD_BACKWARD_OUTPUT: Table = {
    1: Field("loss_fn_output_type", TEXT),
    2: Field(
        "loss_fn_outputs",
        {1: Field("type_tag", TEXT), 2: map_of("fields", BATCHED_TENSOR), 3: Field("num_datums", INT)},
        is_list=True,
    ),
    3: map_of("metrics", DOUBLE),
}
SAMPLED_SEQUENCE: Table = {1: Field("stop_reason", INT), 2: Field("tokens", BYTES), 3: Field("logprobs", BYTES)}
TOP: Table = {
    1: Field("token_ids", BYTES),
    2: Field("logprobs", BYTES),
    3: Field("k", INT),
    4: Field("length", INT),
}
SAMPLE_RESPONSE: Table = {
    1: Field("sequences", SAMPLED_SEQUENCE, is_list=True),
    2: Field("prompt_logprobs", BYTES),
    3: Field("topk_prompt_logprobs", TOP),
}
NO_LOG_PROB = -99999.0
"""Stands, with token 0, where a place has no likeliest tokens: the first."""
STOPPED, OF_LENGTH = 0, 1
"""Why a sequence has ended."""


def values_of(field: str, content: bytes, dtype: int) -> list[Any]:
    """Numbers of a buffer. Raises BadRequest for an unknown dtype, and where it ends inside of a number."""
    items = _ITEMS.get(dtype)
    if items is None:
        raise BadRequest(f"{field}.dtype", f"{dtype} is none of {FLOAT32} (float32), {INT64} (int64), {INT32} (int32)")
    numbers = array(items)
    if len(content) % numbers.itemsize:
        raise BadRequest(field, f"{len(content)} bytes are no whole number of values of {numbers.itemsize} bytes")
    numbers.frombytes(content)
    return numbers.tolist()


def tensor_values(field: str, tensor: Mapping[str, Any]) -> list[Any]:
    """Values of a dense tensor of one dimension. Raises BadRequest for another."""
    if "sparse_csr" in tensor:
        raise BadRequest(field, "a sparse tensor is not taken; try: a dense one")
    values, shape = values_of(field, tensor.get("dense", b""), tensor.get("dtype", 0)), tensor["shape"]
    if shape not in ([], [len(values)]):
        raise BadRequest(f"{field}.shape", f"{shown(shape)} does not fit: one number a token, [{len(values)}]")
    return values


def forward_backward_output(log_probs: Sequence[Sequence[float]], metrics: Mapping[str, float]) -> dict[str, Any]:
    """The reply to a pass: log-probs of every datum's targets, and metrics."""
    flat, offsets = array("f"), array("q", [0])
    for row in log_probs:
        flat.extend(row)
        offsets.append(len(flat) * flat.itemsize)
    field = {"data": flat.tobytes(), "offsets": offsets.tobytes(), "dtype": FLOAT32}
    record = {"type_tag": "ArrayRecord", "fields": {"logprobs": field}, "num_datums": len(log_probs)}
    return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": [record], "metrics": dict(metrics)}


def top_of_prompt(k: int, ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The likeliest tokens in every place of a prompt but the first."""
    tokens, values = array("i", [0] * k), array("f", [NO_LOG_PROB] * k)
    for of_place, values_of_place in zip(ids, log_probs, strict=True):
        tokens.extend(of_place)
        values.extend(values_of_place)
    return {"token_ids": tokens.tobytes(), "logprobs": values.tobytes(), "k": k, "length": len(ids) + 1}


def sampled_sequence(tokens: Sequence[int], log_probs: Sequence[float], is_stopped: bool) -> dict[str, Any]:
    """One sampled sequence."""
    reason = STOPPED if is_stopped else OF_LENGTH
    return {
        "stop_reason": reason,
        "tokens": array("i", tokens).tobytes(),
        "logprobs": array("f", log_probs).tobytes(),
    }
