"""A service in a folder, and requests to it over HTTP without the SDK."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from array import array
from pathlib import Path

import pytest
from command_line import CommandLine
from safetensors import deserialize

from megatron_rl.serve.protobuf import decoded, encoded
from megatron_rl.serve.request_journal import digest_of, records
from megatron_rl.serve.tinker_messages import FORWARD_BACKWARD, FORWARD_BACKWARD_OUTPUT, SAMPLE_RESPONSE

KEYS = {"anna": "tml-anna-0123456789", "bert": "tml-bert-0123456789"}
BASE, PROTOBUF = "assets/demo/model", "application/x-protobuf"
ONLY_ACTOR = ("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false")
ALONE = ("--local", "--collapse", *ONLY_ACTOR)
TOKENS, SAMPLED_TOKENS = (5, 6, 14, 7, 8, 15), (8, 9, 1)
ROW = (*TOKENS, *SAMPLED_TOKENS)


class TrainingService:
    """One life of a service in a folder; the journal there is continued."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        keys = folder / "keys"
        keys.touch(0o600)
        keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
        self.line = CommandLine(folder, "--keys", str(keys), "--port", "0", *overrides, stage="serve")
        self.line.wait_for(lambda: "serving" in self.line.text(), timeout=300)
        self.url = re.search(r"at (http://\S+) for 2 keys", self.line.text())[1]

    def ask(
        self, name: str, body: dict | bytes | None, tenant: str = "anna", method: str | None = None, **headers: str
    ) -> tuple[int, str, bytes]:
        """(status, content type, body) of a request. body: None for none."""
        kind = PROTOBUF if isinstance(body, bytes) else "application/json"
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        fields = {"X-API-Key": KEYS.get(tenant, tenant), "Content-Type": kind} | headers
        request = urllib.request.Request(f"{self.url}/api/v1/{name}", content, fields, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return reply.status, reply.headers.get_content_type(), reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers.get_content_type(), error.read()

    def read(self, name: str, tenant: str = "anna", method: str = "GET", body: dict | None = None) -> dict | int:
        """The reply to a request that is no command; the status of a refusal."""
        status, _, content = self.ask(name, body, tenant, method)
        return json.loads(content) if status == 200 else status

    def saved(self, path: str) -> list[dict[str, bytes]]:
        """Tensors that each rank has saved under a path."""
        files = sorted((self.line.run / "states" / digest_of(path.encode())).glob("*.safetensors"))
        return [{name: bytes(one["data"]) for name, one in deserialize(file.read_bytes())} for file in files]

    def done(self, name: str, body: dict | bytes, tenant: str = "anna") -> tuple[str, bytes]:
        """The reply to a command, once it has one."""
        status, _, content = self.ask(name, body, tenant)
        assert status == 200, content
        return self.reply(content, tenant)

    def reply(self, future: bytes, tenant: str = "anna") -> tuple[str, bytes]:
        """The reply that a future stands for, once it is there."""
        asked = {"request_id": json.loads(future)["request_id"]}
        while True:
            status, kind, content = self.ask("retrieve_future", asked, tenant)
            assert status == 200, content
            if b"try_again" not in content:
                return kind, content


def numbers(content: bytes, items: str = "f") -> list:
    values = array(items)
    values.frombytes(content)
    return values.tolist()


def a_pass(model: str, number: int, loss: str = "cross_entropy", row: tuple[int, ...] = ROW, **options: int) -> bytes:
    """Two data of one row: weights 1 and -0.5."""
    targets = {"dense": array("q", row[1:]).tobytes(), "dtype": 2, "shape": [len(row) - 1]}
    data = []
    for weight in (1.0, -0.5):
        weights = {"dense": array("f", [weight] * (len(row) - 1)).tobytes(), "dtype": 1, "shape": [len(row) - 1]}
        chunks = [{"encoded_text": {"tokens": array("i", row[:-1]).tobytes()}}]
        data.append({"model_input": chunks, "loss_fn_inputs": {"target_tokens": targets, "weights": weights}})
    head = {"model_id": model, "seq_id": number, "loss_fn": loss}
    return encoded(head | {"data": data} | options, FORWARD_BACKWARD)


def sample(sampler: str, number: int, **params: float) -> dict:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": list(TOKENS)}]}
    asked = {"sampling_session_id": sampler, "seq_id": number, "num_samples": 4, "prompt_logprobs": True}
    return asked | {"prompt": prompt, "sampling_params": {"max_tokens": 4} | params}


def log_probs_of(content: bytes) -> list[float]:
    """Of the first datum."""
    record = decoded(content, FORWARD_BACKWARD_OUTPUT)["loss_fn_outputs"][0]["fields"]["logprobs"]
    return numbers(record["data"])[: len(ROW) - 1]


def create(service: TrainingService, tenant: str, rank: int, seed: int | None = None) -> str:
    """A session and a model of a tenant, whose adapters begin with the values of a seed."""
    session = json.loads(service.ask("create_session", {}, tenant)[2])["session_id"]
    places = {"rank": rank, "train_unembed": not rank, "seed": seed}
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": places}
    return json.loads(service.done("create_model", body, tenant)[1])["model_id"]


def two_steps(service: TrainingService, model: str, tenant: str, first: int = 1) -> list[bytes]:
    """Passes and steps of one model, with what it samples between; every reply."""
    adam = {"model_id": model, "adam_params": {"learning_rate": 0.01}}
    replies = []
    for number in (first, first + 3):
        replies.append(service.done("forward_backward", a_pass(model, number), tenant)[1])
        replies.append(service.done("optim_step", adam | {"seq_id": number + 1}, tenant)[1])
        saved = {"model_id": model, "seq_id": number + 2, "sampling_session_seq_id": number}
        content = service.done("save_weights_for_sampler", saved, tenant)[1]
        replies += [content, service.done("asample", sample(json.loads(content)["sampling_session_id"], 0), tenant)[1]]
    return replies


MEGATRON = "actor_rollout_ref.actor.megatron"
ONE = ("trainer.n_gpus_per_node=1", *(f"{MEGATRON}.{axis}_model_parallel_size=1" for axis in ("tensor", "pipeline")))
FOUR = ("trainer.launcher=local", *ONLY_ACTOR)
DP2 = (*FOUR, *ONE[1:], "trainer.n_gpus_per_node=2")
TWO = (*FOUR, "trainer.n_gpus_per_node=2")
LAYOUTS = {"one": ALONE, "DP2": DP2, "TP2xPP2": FOUR}
CUTS = {
    "one": (*ALONE, "actor_rollout_ref.model.lora.rank=4"),
    "TP2": (*TWO, "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1"),
    "PP2": (*TWO, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1"),
    "DP2": DP2,
    "TP2xPP2": FOUR,
}


START = "session-0:sample:99"


def open_start(service: TrainingService) -> str:
    """A sampler of the model as it starts, of the first tenant."""
    base = {"session_id": "session-0", "sampling_session_seq_id": 99, "base_model": BASE}
    assert service.ask("create_sampling_session", base)[0] == 200
    return START


def drawn_by(service: TrainingService, samplers: dict[str, str], number: int, **params: float) -> dict[str, list]:
    """Sampler -> (tokens, log-probs) of each sequence. All are asked while a pass keeps the service busy."""
    busy = service.ask("forward_backward", a_pass("session-0:train:0", number, forward_only=1))[2]
    asked = {name: service.ask("asample", plain(name, number, **params), who)[2] for name, who in samplers.items()}
    contents = {name: service.reply(future, samplers[name])[1] for name, future in asked.items()}
    replies = {name: decoded(content, SAMPLE_RESPONSE) for name, content in contents.items()}
    service.reply(busy)
    return {
        name: [(numbers(one["tokens"], "i"), numbers(one["logprobs"])) for one in reply["sequences"]]
        for name, reply in replies.items()
    }


def plain(name: str, number: int, **params: float) -> dict:
    """A request without log-probs of the prompt, for which the actor would work."""
    return sample(name, number, seed=7, **params) | {"prompt_logprobs": False}


def of_actor(service: TrainingService, name: str, tenant: str, number: int, tokens: list[int]) -> list[float]:
    """The log-probs that the trainer's own forward pass gives tokens behind the prompt, with a version's weights."""
    asked = sample(name, number)
    asked["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [*TOKENS, *tokens]}]}
    reply = decoded(service.done("asample", asked, tenant)[1], SAMPLE_RESPONSE)
    return numbers(reply["prompt_logprobs"])[len(TOKENS) :]


def copies_of_groups(service: TrainingService) -> list[int]:
    """The number of samplers of each group of samples that were drawn together."""
    groups: dict[int, set[str]] = {}
    for head, _ in records(service.line.run / "journal"):
        if head["kind"] == "reply" and ":sample:" in head["request"]:
            groups.setdefault(head["group"], set()).add(head["request"].rpartition(":")[0])
    return [len(samplers) for samplers in groups.values()]


def check_equal(expected: dict[str, list], drawn: dict[str, list]) -> None:
    for name, sequences in expected.items():
        for (tokens, log_probs), (other_tokens, others) in zip(sequences, drawn[name], strict=True):
            assert tokens == other_tokens and others == pytest.approx(log_probs, abs=5e-5), name
