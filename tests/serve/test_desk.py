"""Requests as the SDK sends them (`recorded/requests.json`, written by tinker 0.38), and what is refused of others."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import ActorConfig
from megatron_rl.losses.summed import summed_losses
from megatron_rl.serve.bad_request import BadRequest
from megatron_rl.serve.client_commands import (
    CreateModel,
    DropCopy,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    Row,
    SampleTokens,
    SaveWeights,
    UnloadModel,
)
from megatron_rl.serve.command_log import MOST_AHEAD, CommandReply
from megatron_rl.serve.desk import Desk
from megatron_rl.serve.protobuf import decoded, encoded
from megatron_rl.serve.request_journal import digest_of
from megatron_rl.serve.request_values import ServedModel, adapter_seed
from megatron_rl.serve.sample_request import cut_at, read_stops
from megatron_rl.serve.saved_states import MOST_UNNAMED
from megatron_rl.serve.service import read_body
from megatron_rl.serve.tinker_messages import FORWARD_BACKWARD, FORWARD_BACKWARD_OUTPUT, forward_backward_output

RECORDED = json.loads((Path(__file__).parent / "recorded/requests.json").read_text())
ORDER = (
    *("create_session", "create_model", "get_info", "forward_backward", "optim_step", "save_weights_for_sampler"),
    *("save_weights", "load_weights", "create_sampling_session", "asample"),
)
LOSSES = summed_losses(ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.2))
SERVED = ServedModel("assets/demo/model", rank=0, longest=24, num_tokens=64, losses=LOSSES)
MODEL = "session-0:train:0"


def a_desk(served: ServedModel = SERVED) -> Desk:
    return Desk(served, {"+": 14}.get, seed=1)


def content_of(name: str, **changes: object) -> bytes:
    if name == "forward_backward":
        message = decoded(bytes.fromhex(RECORDED[name]), FORWARD_BACKWARD)
        return encoded(message | changes, FORWARD_BACKWARD)
    return json.dumps(RECORDED[name] | changes).encode()


def post(desk: Desk, name: str, tenant: str = "anna", content: bytes | None = None, **changes: object) -> dict:
    body = content_of(name, **changes) if content is None else content
    return desk.posts[name](tenant, read_body(body, name != "forward_backward"))


def run_all(desk: Desk) -> list:
    """Every command that is ready, each as if it had worked."""
    done = []
    while (entry := desk.log.next()) is not None:
        done.append(entry.command)
        desk.finish(entry, CommandReply({"size_bytes": 8}))
    return done


def opened(*names: str, desk: Desk | None = None) -> Desk:
    """A desk after these recorded requests, each with its reply."""
    desk = desk or a_desk()
    for name in names:
        post(desk, name)
        run_all(desk)
    return desk


def test_every_recorded_request_becomes_its_command() -> None:
    """In the SDK's order, each sent twice, the second time without effect. Would not catch what only a reply shows."""
    desk, commands = a_desk(), []
    for name in ORDER:
        first = post(desk, name)
        changes = desk.num_changes
        if name != "create_session":  # a session is made for each
            assert post(desk, name) == first and desk.num_changes == changes
        commands += run_all(desk)
    created, passed, stepped, for_sampling, saved, loaded, sampled = commands
    assert created == CreateModel(MODEL)
    rows = (
        Row((5, 6, 14, 7, 8, 15), (0.0, 1.0, -1.0, 0.5, 2.0), (0.0, -0.5, -1.0, -0.25, -2.0)),
        Row((9, 1), (-0.5,), (-3.0,)),
    )
    assert passed == ForwardBackward(MODEL, "ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.2}, rows)
    assert stepped.adam["learning_rate"] == 1e-3 and stepped.adam["beta2"] == 0.95 and isinstance(stepped, OptimStep)
    assert for_sampling == SaveWeights(MODEL, f"tinker://{MODEL}/sampler_weights/sampler-3", True, "session-0:sample:0")
    assert saved == SaveWeights(MODEL, f"tinker://{MODEL}/weights/one", for_sampling=False)
    assert loaded == LoadWeights(MODEL, f"tinker://{MODEL}/weights/one", with_optimizer=True)
    assert isinstance(sampled, SampleTokens)
    assert (sampled.weights, sampled.prompt, sampled.num_samples, sampled.max_tokens) == ("", (5, 6, 14), 2, 4)
    assert sampled.stop == (14,) and sampled.prompt_log_probs and sampled.prompt_top == 0
    assert desk.sampler_info("anna", "session-0:sample:0")["model_path"] == for_sampling.path


def floats(*values: float) -> dict:
    return {"dense": struct.pack(f"<{len(values)}f", *values), "dtype": 1, "shape": [len(values)]}


def ints(*values: int) -> dict:
    return {"dense": struct.pack(f"<{len(values)}q", *values), "dtype": 2, "shape": [len(values)]}


def datum(tokens: tuple[int, ...], **columns: dict) -> dict:
    inputs = {"target_tokens": ints(6, 7), "logprobs": floats(0, 0), "advantages": floats(1, 1)} | columns
    chunks = [{"encoded_text": {"tokens": struct.pack(f"<{len(tokens)}i", *tokens)}}]
    return {"model_input": chunks, "loss_fn_inputs": {name: x for name, x in inputs.items() if x is not None}}


def data(*tokens: int, **columns: dict | None) -> dict:
    return {"data": [datum(tokens or (5, 6), **columns)]}


LONG = tuple([5] * 24)
DATA = "data[0].loss_fn_inputs"
BAD_PASSES = {
    "an unknown loss": ({"loss_fn": "pppo"}, "loss_fn", "try: ppo"),
    "no loss": ({"loss_fn": ""}, "loss_fn", "none of"),
    "an unknown setting": ({"loss_fn_config": {"clip": 0.5}}, "loss_fn_config", "clip_"),
    "a setting that is text": (
        {"loss_fn_config_v2": {"clip_low_threshold": {"text": "x"}}},
        "clip_low_threshold",
        "'x'",
    ),
    "a setting without end": ({"loss_fn_config": {"clip_high_threshold": float("inf")}}, "clip_high_threshold", "inf"),
    "a setting of this package that is too small": (
        {"loss_fn": "vanilla", "loss_fn_config": {"clip_ratio_c": 0.5}},
        "clip_ratio_c",
        "must be > 1; try: 3.0",
    ),
    "a loss of later": ({"loss_fn": "stable_reinforce"}, "loss_fn", "none of"),
    "no mask of the tokens that count": ({"loss_fn": "gspo"}, f"{DATA}.sequence_ratio_mask", "missing"),
    "thresholds in another order": (
        {"loss_fn_config_v2": {"clip_low_threshold": {"number": 2.0}}},
        "loss_fn_config",
        "above",
    ),
    "no data": ({"data": []}, "data", "no datum"),
    "no tokens": ({"data": [{"model_input": [], "loss_fn_inputs": {}}]}, "data[0].model_input", "no token"),
    "an image": ({"data": [{"model_input": [{"image": {}}]}]}, "data[0].model_input[0]", "image"),
    "audio": ({"data": [{"model_input": [{"dmel": {}}]}]}, "data[0].model_input[0]", "dmel"),
    "an unknown token": (data(5, 64), "data[0].model_input[1]", "0 to 63"),
    "a token below 0": (data(-1, 6), "data[0].model_input[0]", "0 to 63"),
    "a row that is too long": (data(*LONG), "data[0].model_input", "24 of a row"),
    "no targets": (data(target_tokens=None), f"{DATA}.target_tokens", "missing"),
    "targets of another length": (data(target_tokens=ints(6)), f"{DATA}.target_tokens", "1 values do not fit 2"),
    "targets that are not shifted": (data(target_tokens=ints(5, 7)), f"{DATA}.target_tokens[0]", "next token, 6"),
    "targets that are no tokens": (data(target_tokens=ints(6, 999)), f"{DATA}.target_tokens[1]", "0 to 63"),
    "targets in float32": (data(target_tokens=floats(6, 7)), f"{DATA}.target_tokens.dtype", "int64"),
    "weights of another loss": (data(weights=floats(1, 1)), DATA, "weights"),
    "NaN": (data(advantages=floats(1, float("nan"))), f"{DATA}.advantages[1]", "not finite"),
    "an infinite log-prob": (data(logprobs=floats(float("-inf"), 0)), f"{DATA}.logprobs[0]", "not finite"),
    "too many advantages": (data(advantages=floats(1, 1, 1)), f"{DATA}.advantages", "try: 2"),
    "no log-probs": (data(logprobs=None), f"{DATA}.logprobs", "missing"),
    "bfloat16": (data(advantages={"dense": b"1234", "dtype": 4, "shape": [2]}), f"{DATA}.advantages.dtype", "float32"),
    "half of a number": (data(advantages={"dense": b"123", "dtype": 1, "shape": []}), f"{DATA}.advantages", "3 bytes"),
    "another shape": (
        data(advantages={"dense": b"12345678", "dtype": 1, "shape": [1, 2]}),
        f"{DATA}.advantages.shape",
        "one number a token",
    ),
    "a sparse tensor": (data(advantages={"sparse_csr": {}, "dtype": 1, "shape": [2]}), f"{DATA}.advantages", "sparse"),
    "a foreign model": ({"model_id": "session-9:train:0"}, "model_id", "no model of this key"),
    "no number": ({"seq_id": 0}, "seq_id", "try: 1"),
    "a number below 0": ({"seq_id": -5}, "seq_id", "try: 1"),
    "a number far ahead": ({"seq_id": MOST_AHEAD + 1}, "seq_id", f"try: {MOST_AHEAD}"),
}
BAD_JSON = {
    "another base": ("create_model", {"base_model": "Qwen/Qwen3-8B"}, "base_model", "try: assets/demo/model"),
    "another rank": ("create_model", {"lora_config": {"rank": 32}}, "lora_config.rank", "try: 0"),
    "a seed": ("create_model", {"lora_config": {"rank": 0, "seed": 3}}, "lora_config.seed", "try: null"),
    "no adapter": ("create_model", {"lora_config": None}, "lora_config", "missing"),
    "no MLP": ("create_model", {"lora_config": {"rank": 0, "train_mlp": False}}, "lora_config.train_mlp", "try: true"),
    "another optimizer": ("create_model", {"optimizer_config": {"type": "dimuon"}}, "optimizer_config.type", "adamw"),
    "a foreign session": ("create_model", {"session_id": "session-7"}, "session_id", "no session of this key"),
    "a negative rate": ("optim_step", {"adam_params": {"learning_rate": -1}}, "learning_rate", "try: 0.0"),
    "beta of 1": ("optim_step", {"adam_params": {"beta1": 1.0}}, "beta1", "try: 0.999999"),
    "a rate that is text": ("optim_step", {"adam_params": {"learning_rate": "1"}}, "learning_rate", "finite number"),
    "an unknown parameter": ("optim_step", {"adam_params": {"lr": 1.0}}, "adam_params", "learning_rate"),
    "no parameters": ("optim_step", {"adam_params": None}, "adam_params", "no parameters"),
    "Dimuon": ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "optimizer_params", "adam_params"),
    "a number that is text": ("optim_step", {"seq_id": "2"}, "seq_id", "no whole number"),
    "a number that is true": ("optim_step", {"seq_id": True}, "seq_id", "no whole number"),
    "a path that climbs": ("save_weights", {"path": "../../etc/passwd"}, "path", "try: etc-passwd"),
    "a path of dots": ("save_weights", {"path": ".."}, "path", "try: a"),
    "an absolute path": ("save_weights", {"path": "/tmp/x"}, "path", "try: tmp-x"),
    "a long path": ("save_weights", {"path": "x" * 200}, "path", "at most 128"),
    "an empty path": ("save_weights", {"path": ""}, "path", "no text"),
    "another kind": ("save_weights_for_sampler", {"kind": "inflight"}, "kind", "snapshot"),
    "nothing saved": ("load_weights", {"path": "tinker://x/weights/y"}, "path", "nothing that this key has saved"),
    "a path of this machine": ("load_weights", {"path": "/etc/passwd"}, "path", "nothing that this key has saved"),
    "an unknown sampler": ("asample", {"sampling_session_id": "s"}, "sampler_id", "no sampling session"),
    "no samples": ("asample", {"num_samples": 0}, "num_samples", "try: 1"),
    "too many samples": ("asample", {"num_samples": 10**6}, "num_samples", "try: 1024"),
    "an empty prompt": ("asample", {"prompt": {"chunks": []}}, "prompt", "no token"),
    "no prompt": ("asample", {"prompt": None}, "prompt.chunks", "no list"),
    "an image prompt": ("asample", {"prompt": {"chunks": [{"type": "image"}]}}, "prompt.chunks[0]", "image"),
    "a long prompt": ("asample", {"prompt": {"chunks": [{"tokens": [5] * 24}]}}, "prompt", "no room"),
    "tokens that are text": ("asample", {"prompt": {"chunks": [{"tokens": ["5"]}]}}, "prompt[0]", "no token"),
    "too many tokens": ("asample", {"sampling_params": {"max_tokens": 22}}, "max_tokens", "try: 21"),
    "a cold temperature": ("asample", {"sampling_params": {"temperature": -1}}, "temperature", "try: 0.0"),
    "no mass": ("asample", {"sampling_params": {"top_p": 0}}, "top_p", "try: 1e-06"),
    "an empty stop": ("asample", {"sampling_params": {"stop": [""]}}, "sampling_params.stop[0]", "try: 1 to 256"),
    "too many stops": ("asample", {"sampling_params": {"stop": ["a"] * 17}}, "sampling_params.stop", "try: 16"),
    "a stop that is no token": (
        "asample",
        {"sampling_params": {"stop": [99]}},
        "sampling_params.stop[0][0]",
        "0 to 63",
    ),
    "too many likeliest": ("asample", {"topk_prompt_logprobs": 65}, "topk_prompt_logprobs", "try: 64"),
    "top-k of samples": ("asample", {"topk_sample_logprobs": 5}, "topk_sample_logprobs", "try: 0"),
    "alternatives": ("asample", {"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k", "try: 0"),
}


@pytest.fixture(scope="module")
def desk() -> Desk:
    """With a session, a model and a sampler; nothing below may change it."""
    return opened("create_session", "create_model", "create_sampling_session")


def refusal_of(desk: Desk, name: str, **options: object) -> BadRequest:
    """The refusal of a request, which has no effect."""
    before = desk.num_changes, desk.log.next_number(MODEL)
    with pytest.raises(BadRequest) as caught:
        post(desk, name, **options)
    assert (desk.num_changes, desk.log.next_number(MODEL)) == before and desk.log.next() is None
    assert 400 <= caught.value.status < 500 and len(str(caught.value)) < 700
    return caught.value


@pytest.mark.parametrize("case", BAD_PASSES)
def test_bad_passes_are_refused(case: str, desk: Desk) -> None:
    """With the field and the nearest value, and without effect. Would not catch a value that no row here has."""
    changes, field, sentence = BAD_PASSES[case]
    refusal = refusal_of(desk, "forward_backward", **changes)
    assert refusal.field == field and sentence in str(refusal), refusal


@pytest.mark.parametrize("case", BAD_JSON)
def test_bad_requests_are_refused(case: str, desk: Desk) -> None:
    """As `test_bad_passes_are_refused`."""
    name, changes, field, sentence = BAD_JSON[case]
    refusal = refusal_of(desk, name, **changes)
    assert refusal.field == field and sentence in str(refusal), refusal


def test_a_seed_needs_adapters_that_begin_with_its_values() -> None:
    """Would not catch a seed with another's values; test_service.py compares them."""
    adapters = replace(SERVED, rank=4)
    assert (adapter_seed({}, adapters), adapter_seed({"seed": -3}, adapters)) == (None, -3)
    with pytest.raises(BadRequest, match="adapter_path"):
        adapter_seed({"seed": 3}, replace(adapters, seeds_adapters=False))


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x1a\x80", b"{}", b"\x1b\x0a", b"\x80" * 11])
def test_bodies_that_are_no_message(content: bytes, desk: Desk) -> None:
    """Would not catch a message that is none of this API and yet fits."""
    assert refusal_of(desk, "forward_backward", content=content).field in ("body", "model_id")


def test_bodies_that_are_no_json(desk: Desk) -> None:
    """NaN is none, nor is a list. Would not catch other dialects."""
    for content in (b"{", b"[]", b'{"seq_id": NaN}', b"\xff", b"[" * 100_000):
        assert refusal_of(desk, "optim_step", content=content).field == "body"


def test_another_tenant_sees_nothing() -> None:
    """Models, sessions, samplers, states and commands of one key do not exist for another: 404, as what is nowhere."""
    desk = opened(*ORDER)
    post(desk, "create_session", "bert")
    for name in ORDER[1:8]:
        with pytest.raises(BadRequest) as caught:
            post(desk, name, "bert")
        assert caught.value.status == 404, name
    assert refusal_of(desk, "asample", tenant="bert", seq_id=50).status == 404
    mine = {"model_path": f"tinker://{MODEL}/sampler_weights/sampler-3", "session_id": "session-1", "base_model": None}
    assert refusal_of(desk, "create_sampling_session", tenant="bert", **mine).status == 404
    with pytest.raises(BadRequest, match="no command of this key"):
        desk.log.find("bert", f"{MODEL}:1")


def test_a_saved_name_is_not_saved_again() -> None:
    """Unless it is to be replaced. Would not catch a state that is replaced while it is loaded."""
    desk = opened("create_session", "create_model", "forward_backward", "optim_step", "save_weights_for_sampler")
    opened("save_weights", desk=desk)
    assert "try: overwrite=true, or one-2" in str(refusal_of(desk, "save_weights", seq_id=5))
    post(desk, "save_weights", seq_id=5, overwrite=True)
    assert [type(one) for one in run_all(desk)] == [SaveWeights, DropCopy]


def paths_of(desk: Desk, tenant: str = "anna") -> list[str]:
    return [row["tinker_path"].rpartition("/")[2] for row in desk.checkpoints(tenant)]


TRAINED = ("create_session", "create_model", "forward_backward", "optim_step", "save_weights_for_sampler")
ONE = f"tinker://{MODEL}/weights/one"


def test_saved_states_end_with_their_time() -> None:
    """To the second: until then listed and loaded, then 404 and dropped, once. Another time can be set, or none.

    Would not catch a clock that is wrong.
    """
    desk = a_desk()
    desk.now = 1000.0
    opened(*TRAINED, desk=desk)
    post(desk, "save_weights", ttl_seconds=3600, user_metadata={"step": "4"})
    run_all(desk)
    [_, row] = desk.checkpoints("anna")
    assert row["expires_at"] == "1970-01-01T01:16:40+00:00" and row["user_metadata"] == {"step": "4"}
    assert row["checkpoint_id"] == "weights/one" and row["checkpoint_type"] == "training" and row["size_bytes"] == 8
    asked = {"path": ONE, "ttl_seconds": 7200}
    for now, seconds, there in (
        (4599.9, 7200, True),
        (11799.8, 3600, True),
        (15399.7, 3600, True),
        (19000.0, 1, False),
    ):
        desk.now = now
        assert (paths_of(desk) == ["sampler-3", "one"]) == there and desk.has_due == (not there)
        if there:
            assert post(desk, "set_checkpoint_ttl", content=json.dumps(asked | {"ttl_seconds": seconds}).encode()) == {}
    assert refusal_of(desk, "load_weights", seq_id=5).status == 404
    desk.expire()
    assert run_all(desk) == [DropCopy(ONE)] and not desk.has_due
    for seconds in (3599, 400_000_000, "1", True):
        assert refusal_of(desk, "save_weights", seq_id=5, ttl_seconds=seconds).field == "ttl_seconds"
    post(desk, "save_weights", seq_id=5)  # its name is free again, and never that of the old copy
    assert run_all(desk) == [SaveWeights(MODEL, f"{ONE}~1", for_sampling=False)]


def test_a_copy_goes_after_its_last_reader() -> None:
    """Deleted while a command waits to load it: that one still does. Saved again: the old one goes, too.

    Would not catch a file that a rank leaves behind.
    """
    desk = opened(*TRAINED, "save_weights")
    post(desk, "load_weights", seq_id=5)
    post(desk, "delete_checkpoint", content=json.dumps({"path": ONE}).encode())
    assert paths_of(desk) == ["sampler-3"] and refusal_of_waiting(desk, "load_weights", seq_id=6) == 404
    assert run_all(desk) == [LoadWeights(MODEL, ONE, with_optimizer=True), DropCopy(ONE)]
    for number, copy in ((6, f"{ONE}~1"), (7, f"{ONE}~2")):
        post(desk, "save_weights", seq_id=number, overwrite=True)
        assert run_all(desk)[0] == SaveWeights(MODEL, copy, for_sampling=False)
    assert run_all(desk) == [] and paths_of(desk) == ["sampler-3", "one"]


def refusal_of_waiting(desk: Desk, name: str, **changes: object) -> int:
    with pytest.raises(BadRequest) as caught:
        post(desk, name, **changes)
    return caught.value.status


def test_only_the_newest_weights_without_a_name_stay() -> None:
    """64 of a model; a session that has ended leaves named ones alone, and takes no further command.

    Would not catch what a rank still holds of it.
    """
    desk = opened("create_session", "create_model")
    for number in range(1, MOST_UNNAMED + 2):
        post(desk, "save_weights_for_sampler", seq_id=number, sampling_session_seq_id=number)
    post(desk, "save_weights", seq_id=number + 1)
    assert [one.copy.rpartition("/")[2] for one in run_all(desk) if isinstance(one, DropCopy)] == ["sampler-1"]
    asked = {"sampling_session_id": "session-0:sample:1"}
    assert "no sampling session of this key" in str(refusal_of(desk, "asample", **asked))
    post(desk, "asample", sampling_session_id="session-0:sample:2")
    assert (
        refusal_of_waiting(desk, "unload_model", content=json.dumps({"model_id": "session-1:train:0"}).encode()) == 404
    )
    post(desk, "finish_session", content=json.dumps({"session_id": "session-0"}).encode())
    done = run_all(desk)
    assert UnloadModel(MODEL) in done and sum(isinstance(one, DropCopy) for one in done) == MOST_UNNAMED
    assert paths_of(desk) == ["one"] and "is unloaded" in str(refusal_of(desk, "optim_step", seq_id=number + 2))
    loaded = post(desk, "load_weights", model_id=None, session_id="session-0", model_seq_id=1)
    assert loaded == {"request_id": "session-0:train:1:create"}
    assert run_all(desk) == [CreateModel("session-0:train:1", ONE, with_optimizer=True)]


def test_lists_are_a_tenants_own() -> None:
    """Runs, checkpoints and sessions of one key do not exist for another, nor can it delete them or set their time."""
    desk = opened(*TRAINED, "save_weights")
    post(desk, "create_session", "bert")
    [run] = desk.training_runs("anna")
    assert run["training_run_id"] == MODEL and run["last_checkpoint"]["tinker_path"] == ONE
    assert run["last_sampler_checkpoint"]["checkpoint_type"] == "sampler" and run["lora_rank"] is None
    found = {"training_run_ids": [MODEL], "sampler_ids": ["session-0:sample:0"]}
    assert desk.session("anna", "session-0") == found and desk.sessions("bert") == ["session-1"]
    assert desk.training_runs("bert") == desk.checkpoints("bert") == []
    for asked in (
        lambda: desk.training_run("bert", MODEL),
        lambda: desk.checkpoints("bert", MODEL),
        lambda: desk.session("bert", "session-0"),
        lambda: post(desk, "delete_checkpoint", "bert", content=json.dumps({"path": ONE}).encode()),
        lambda: post(desk, "set_checkpoint_ttl", "bert", content=json.dumps({"path": ONE}).encode()),
        lambda: post(desk, "unload_model", "bert", content=json.dumps({"model_id": MODEL}).encode()),
        lambda: post(desk, "finish_session", "bert", content=json.dumps({"session_id": "session-0"}).encode()),
    ):
        with pytest.raises(BadRequest) as caught:
            asked()
        assert caught.value.status == 404
    assert paths_of(desk) == ["sampler-3", "one"]


def test_a_sequence_ends_with_the_first_text() -> None:
    """Two tokens long, within a token, or never. Would not catch a tokenizer whose prefixes read differently."""
    words = {1: "a", 2: "bc", 3: "d"}

    def decode(ids: list[int]) -> str:
        return "".join(words[one] for one in ids)

    assert cut_at(("ab",), [3, 1, 2, 1, 2], decode) == 3 and cut_at(("cd", "b"), [1, 2, 3], decode) == 2
    assert cut_at(("cb",), [1, 2, 3], decode) is None and cut_at(("a",), [], decode) is None
    assert read_stops(["+", "ab", 7], SERVED, {"+": 14}.get) == ((14, 7), ("+", "ab"))
    assert read_stops("ab", SERVED, {"+": 14}.get) == ((), ("ab",)) and read_stops(None, SERVED, {}.get) == (None, ())


def test_later_requests_do_not_wait_for_a_refused_one() -> None:
    """The SDK goes on with the next number. Until then another request may have it; one that was to come again waits.

    Would not catch a client that gives a number up without a request.
    """
    desk = opened("create_session", "create_model")
    assert refusal_of(desk, "forward_backward", loss_fn="pppo").field == "loss_fn" and desk.refused == (MODEL, 1)
    post(desk, "forward_backward", seq_id=1)  # right now
    assert [type(one) for one in run_all(desk)] == [ForwardBackward]
    assert refusal_of(desk, "forward_backward", loss_fn="pppo", seq_id=2).status == 400
    assert refusal_of(desk, "optim_step", seq_id=3, adam_params=None).status == 400
    post(desk, "optim_step", seq_id=4)
    assert [type(one) for one in run_all(desk)] == [OptimStep] and desk.log.next_number(MODEL) == 5
    assert "not in 5 to" in str(refusal_of(desk, "optim_step", seq_id=3))
    post(desk, "optim_step", seq_id=6)
    assert run_all(desk) == []
    assert refusal_of_waiting(desk, "load_weights", seq_id=5, path="tinker://x/weights/y") == 404
    assert [type(one) for one in run_all(desk)] == [OptimStep]


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(content: bytes) -> None:
    """No other error, whatever is sent. Would not catch slow input."""
    with suppress(ValueError):
        decoded(content, FORWARD_BACKWARD)


def test_messages_survive_their_bytes() -> None:
    """What is written can be read: an reply and a recorded request. That the SDK reads replies is its own test's."""
    reply = forward_backward_output([[-1.5, 2.0], [], [0.25]], {"loss:sum": -3.5})
    assert decoded(encoded(reply, FORWARD_BACKWARD_OUTPUT), FORWARD_BACKWARD_OUTPUT) == reply
    recorded = bytes.fromhex(RECORDED["forward_backward"])
    message = decoded(recorded, FORWARD_BACKWARD)
    assert decoded(encoded(message, FORWARD_BACKWARD), FORWARD_BACKWARD) == message
    assert digest_of(recorded) != digest_of(b"")
