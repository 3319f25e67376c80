"""The state of a service's clients: sessions, models, samplers and saved states, each of one tenant.

A request becomes a command of the log, or is replied to here. The same requests in the same order give the same names,
so that a journal of requests is enough to come back to them. No processes, no clock, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.serve import request_values
from megatron_rl.serve.bad_request import BadRequest, one_of, shown
from megatron_rl.serve.client_commands import Command, CreateModel, LoadWeights, OptimStep, SampleTokens, SaveWeights
from megatron_rl.serve.command_log import CommandLog, CommandReply, Entry
from megatron_rl.serve.protobuf import decoded
from megatron_rl.serve.request_journal import digest_of
from megatron_rl.serve.request_values import ServedModel
from megatron_rl.serve.tinker_messages import FORWARD_BACKWARD

SCHEME = "tinker://"
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
MOST_SESSIONS, MOST_MODELS, MOST_SAVED = 1000, 64, 1000
"""A tenant's open sessions, models, and states and weights that are kept in host memory."""
MOST_NUMBER = 1 << 53


@dataclass(frozen=True)
class Body:
    """The body of a request. json: its values; None where it is in Protocol Buffers."""

    content: bytes
    json: Mapping[str, Any] | None

    @property
    def values(self) -> Mapping[str, Any]:
        """The values of a JSON body. Raises BadRequest where it is in Protocol Buffers."""
        if self.json is None:
            raise BadRequest("Content-Type", "only forward_backward is in Protocol Buffers; try: application/json", 415)
        return self.json


@dataclass(frozen=True)
class ClientModel:
    """A model that a client trains."""

    tenant: str
    session: str


@dataclass(frozen=True)
class SavedPath:
    """A state, or weights for sampling, under a path."""

    tenant: str
    model: str
    for_sampling: bool
    is_whole: bool = False


@dataclass(frozen=True)
class SamplingSession:
    """A sampling session. weights: a path; "" for the model as the service starts."""

    tenant: str
    weights: str


class Desk:
    """Checks requests and turns them into commands of a log. One thread at a time may call it."""

    def __init__(self, served: ServedModel, stop_token: Callable[[str], int | None], seed: int) -> None:
        """stop_token: the token that is this text, if one is. seed: of samples whose client has none."""
        self.served, self.log = served, CommandLog()
        self._stop_token, self._seed = stop_token, seed
        self._sessions: dict[str, str] = {}
        self._models: dict[str, ClientModel] = {}
        self._saved: dict[str, SavedPath] = {}
        self._samplers: dict[str, SamplingSession] = {}
        self.num_changes = 0
        """Number of new requests so far; others change nothing, and a journal leaves them out."""
        self.posts: dict[str, Callable[[str, Body], dict[str, Any]]] = {
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "weights_info": self._weights_info,
        }
        """The last part of a path -> what takes a request of it: (tenant, body) -> reply."""

    # Sessions and models

    def _create_session(self, tenant: str, body: Body) -> dict[str, Any]:
        num_sessions = sum(owner == tenant for owner in self._sessions.values())
        if num_sessions >= MOST_SESSIONS:
            raise BadRequest("session", f"this key has {num_sessions} sessions; try: one of them", 429)
        session = f"session-{len(self._sessions)}"
        self._sessions[session] = tenant
        self.num_changes += 1
        return {"type": "create_session", "session_id": session}

    def _heartbeat(self, tenant: str, body: Body) -> dict[str, Any]:
        self._session(tenant, body.values)
        return {"type": "session_heartbeat"}

    def _session(self, tenant: str, values: Mapping[str, Any]) -> str:
        session = request_values.text(values, "session_id")
        if self._sessions.get(session) != tenant:
            raise BadRequest("session_id", f"{shown(session)} is no session of this key", 404)
        return session

    def _model(self, tenant: str, model: str) -> str:
        found = self._models.get(model)
        if found is None or found.tenant != tenant:
            raise BadRequest("model_id", f"{shown(model)} is no model of this key", 404)
        return model

    def _model_of(self, tenant: str, body: Body) -> str:
        return self._model(tenant, request_values.text(body.values, "model_id"))

    def _create_model(self, tenant: str, body: Body) -> dict[str, Any]:
        values, session = body.values, self._session(tenant, body.values)
        self._check_base(values)
        if (values.get("optimizer_config") or {}).get("type", "adamw") != "adamw":
            raise BadRequest("optimizer_config.type", f"{shown(values['optimizer_config'])} is not served; try: adamw")
        self._check_adapter(values.get("lora_config"))
        model = self._new_model(tenant, session, values)
        return self._given(tenant, CreateModel(model), body, f"{model}:create")

    def _new_model(self, tenant: str, session: str, values: Mapping[str, Any]) -> str:
        model = f"{session}:train:{request_values.whole(values, 'model_seq_id', 0, MOST_NUMBER)}"
        num_models = sum(one.tenant == tenant for one in self._models.values())
        if model not in self._models and num_models >= MOST_MODELS:
            raise BadRequest("model", f"this key has {num_models} models; try: load_weights into one of them", 429)
        self._models.setdefault(model, ClientModel(tenant, session))
        return model

    def _check_base(self, values: Mapping[str, Any]) -> None:
        one_of("base_model", values.get("base_model"), [self.served.base_model])

    def _check_adapter(self, lora: Any) -> None:
        """Adapters are the configuration's: rank and places must be the same."""
        if not isinstance(lora, dict):
            raise BadRequest("lora_config", f"it is missing; try: rank={self.served.rank}")
        rank = request_values.whole(lora, "rank", 0, 1 << 20)
        if rank != self.served.rank:
            meaning = "all weights are trained" if not self.served.rank else "rank of the configuration's adapters"
            raise BadRequest("lora_config.rank", f"{rank} is not served; try: {self.served.rank}, {meaning}")
        if lora.get("seed") is not None:
            raise BadRequest("lora_config.seed", f"{lora['seed']} is not served: trainer.seed decides; try: null")
        expected = {
            "train_unembed": not rank,
            "train_mlp": self.served.trains_mlp,
            "train_attn": self.served.trains_attention,
        }
        for name, value in expected.items():
            if request_values.flag(lora, name, True) != value:
                raise BadRequest(f"lora_config.{name}", f"{not value} is not served; try: {value}".lower())

    def _get_info(self, tenant: str, body: Body) -> dict[str, Any]:
        model, served = self._model_of(tenant, body), self.served
        data = {"model_name": served.base_model, "tokenizer_id": served.base_model}
        adapters = {"is_lora": served.rank > 0, "lora_rank": served.rank}
        return {"type": "get_info", "model_id": model, "model_name": served.base_model, "model_data": data} | adapters

    # Training

    def _forward_backward(self, tenant: str, body: Body) -> dict[str, Any]:
        if body.json is not None:
            raise BadRequest(
                "Content-Type", "forward_backward is taken in Protocol Buffers: application/x-protobuf", 415
            )
        try:
            message = decoded(body.content, FORWARD_BACKWARD)
        except ValueError as error:
            raise BadRequest("body", f"it is no ForwardBackwardRequest: {error}") from None
        model = self._model(tenant, request_values.text(message, "model_id"))
        number = request_values.whole(message, "seq_id", 1, MOST_NUMBER)
        return self._numbered(tenant, request_values.read_pass(message, model, self.served), body, number)

    def _optim_step(self, tenant: str, body: Body) -> dict[str, Any]:
        model = self._model_of(tenant, body)
        return self._numbered(tenant, OptimStep(model, request_values.read_adam(body.values)), body)

    def _save_weights(self, tenant: str, body: Body) -> dict[str, Any]:
        model = self._model_of(tenant, body)
        path = self._new_path(tenant, model, body.values, "weights")
        return self._numbered(tenant, SaveWeights(model, path, for_sampling=False), body)

    def _save_for_sampler(self, tenant: str, body: Body) -> dict[str, Any]:
        model, values = self._model_of(tenant, body), body.values
        if values.get("kind", "snapshot") != "snapshot":
            raise BadRequest("kind", f"{shown(values['kind'])} is not served; try: snapshot")
        number, sampler = self._number(values), ""
        if values.get("path") is None:
            place = request_values.whole(values, "sampling_session_seq_id", 0, MOST_NUMBER)
            sampler, values = f"{self._models[model].session}:sample:{place}", {**values, "path": f"sampler-{number}"}
        path = self._new_path(tenant, model, values, "sampler_weights")
        return self._numbered(tenant, SaveWeights(model, path, True, sampler), body)

    def _new_path(self, tenant: str, model: str, values: Mapping[str, Any], folder: str) -> str:
        """The path under which a request saves. The same request may come again."""
        name, number = request_values.text(values, "path"), self._number(values)
        if NAME.fullmatch(name) is None:
            near = re.sub("[^A-Za-z0-9_-]+", "-", name)[:64].strip("-") or "a"
            rule = "is no name of at most 128 letters, digits, '.', '_' and '-' that begins with no '.'"
            raise BadRequest("path", f"{shown(name)} {rule}; try: {near}")
        path = f"{SCHEME}{model}/{folder}/{name}"
        is_again = self.log.has(f"{model}:{number}")
        if path in self._saved and not (is_again or request_values.flag(values, "overwrite")):
            raise BadRequest("path", f"{name} is saved already; try: overwrite=true, or {name[:120]}-2")
        if path not in self._saved and sum(one.tenant == tenant for one in self._saved.values()) >= MOST_SAVED:
            raise BadRequest("path", f"this key has {MOST_SAVED} saved states; try: overwrite=true", 429)
        return path

    def _load_weights(self, tenant: str, body: Body) -> dict[str, Any]:
        values = body.values
        path, with_optimizer = self._state(tenant, values), request_values.flag(values, "optimizer")
        if values.get("model_id") is not None:
            return self._numbered(tenant, LoadWeights(self._model_of(tenant, body), path, with_optimizer), body)
        session = self._session(tenant, values)
        if values.get("base_model") is not None:
            self._check_base(values)
        model = self._new_model(tenant, session, values)
        return self._given(tenant, CreateModel(model, path, with_optimizer), body, f"{model}:create")

    def _state(self, tenant: str, values: Mapping[str, Any], for_sampling: bool = False) -> str:
        path = request_values.text(values, "model_path" if for_sampling else "path")
        saved = self._saved.get(path)
        if saved is None or saved.tenant != tenant or not saved.is_whole:
            raise BadRequest("path", f"{shown(path)} is nothing that this key has saved", 404)
        if saved.for_sampling != for_sampling:
            folder = "sampler_weights" if for_sampling else "weights"
            raise BadRequest("path", f"{shown(path)} cannot be used for this; try: one of {SCHEME}.../{folder}/...")
        return path

    def _weights_info(self, tenant: str, body: Body) -> dict[str, Any]:
        self._state(tenant, {"path": body.values.get("tinker_path")})
        served = self.served
        places = {
            "train_mlp": served.trains_mlp,
            "train_attn": served.trains_attention,
            "train_unembed": not served.rank,
        }
        return {"base_model": served.base_model, "is_lora": served.rank > 0, "lora_rank": served.rank} | places

    # Sampling

    def _create_sampling_session(self, tenant: str, body: Body) -> dict[str, Any]:
        values, session = body.values, self._session(tenant, body.values)
        sampler = f"{session}:sample:{request_values.whole(values, 'sampling_session_seq_id', 0, MOST_NUMBER)}"
        weights = ""
        if values.get("model_path") is not None:
            weights = self._state(tenant, values, for_sampling=True)
        else:
            self._check_base(values)
        made = SamplingSession(tenant, weights)
        self.num_changes += sampler not in self._samplers
        if self._samplers.setdefault(sampler, made) != made:
            raise BadRequest("sampling_session_seq_id", f"{sampler} reads other weights; try: the next number")
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def sampler_info(self, tenant: str, name: str) -> dict[str, Any]:
        """Return the weights of a sampling session. Raises BadRequest for one that the tenant does not have."""
        sampler = self._samplers.get(name)
        if sampler is None or sampler.tenant != tenant:
            raise BadRequest("sampler_id", f"{shown(name)} is no sampling session of this key", 404)
        return {"sampler_id": name, "base_model": self.served.base_model, "model_path": sampler.weights or None}

    def _sample(self, tenant: str, body: Body) -> dict[str, Any]:
        values = body.values
        name = request_values.text(values, "sampling_session_id")
        self.sampler_info(tenant, name)
        number = request_values.whole(values, "seq_id", 0, 1 << 62)
        request = f"{name}:{number}"
        command = self._read_sample(values, self._samplers[name].weights, request)
        given = self._given(tenant, command, body, request)
        return given | {"sample_sequence_ids": [f"{request}:{place}" for place in range(command.num_samples)]}

    def _read_sample(self, values: Mapping[str, Any], weights: str, request: str) -> SampleTokens:
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
            if values.get(name):
                raise BadRequest(name, f"{shown(values[name])} is not served; try: 0")
        for name in ("target_prompt_logprobs", "prompt_logprobs_last_n"):
            if values.get(name) is not None:
                raise BadRequest(name, f"{shown(values[name])} is not served; try: null")
        prompt, params = self._prompt(values.get("prompt")), values.get("sampling_params")
        if not isinstance(params, dict):
            raise BadRequest("sampling_params", f"{shown(params)} are no parameters")
        room = self.served.longest - len(prompt)
        if room < 1:
            raise BadRequest(
                "prompt", f"{len(prompt)} tokens leave no room for another in the {self.served.longest} of a row"
            )
        drawn = int(digest_of(f"{self._seed},{request}".encode()), 16) >> 1
        return SampleTokens(
            weights,
            prompt,
            request_values.whole(values, "num_samples", 1, request_values.MOST_SAMPLES, 1),
            request_values.whole(params, "max_tokens", 1, room, room),
            request_values.number(params, "temperature", 0.0, 100.0, 1.0),
            request_values.number(params, "top_p", 1e-6, 1.0, 1.0),
            request_values.whole(params, "top_k", -1, self.served.num_tokens, -1),
            request_values.whole(params, "seed", -(1 << 63), (1 << 63) - 1, drawn),
            self._stops(params.get("stop")),
            request_values.flag(values, "prompt_logprobs"),
        )

    def _prompt(self, prompt: Any) -> tuple[int, ...]:
        chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
        if not isinstance(chunks, list):
            raise BadRequest("prompt.chunks", f"{shown(chunks)} is no list")
        ids: list[Any] = []
        for place, chunk in enumerate(chunks):
            kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else None
            if kind != "encoded_text" or not isinstance(chunk.get("tokens"), list):
                raise BadRequest(f"prompt.chunks[{place}]", f"{shown(kind)} is not served; try: encoded_text")
            ids += chunk["tokens"]
        found = request_values.tokens("prompt", ids, self.served)
        if not found:
            raise BadRequest("prompt", "it has no token; try: one")
        return found

    def _stops(self, stop: Any) -> tuple[int, ...] | None:
        if stop is None:
            return None
        found = list[int]()
        for place, one in enumerate([stop] if isinstance(stop, str) else stop if isinstance(stop, list) else [stop]):
            token = self._stop_token(one) if isinstance(one, str) else one
            if token is None:
                rule = f"{shown(one)} is not one token of the model, and longer texts are not served"
                raise BadRequest(f"sampling_params.stop[{place}]", f"{rule}; try: ids of tokens")
            found += request_values.tokens(f"sampling_params.stop[{place}]", [token], self.served)
        return tuple(found)

    # Commands

    def _number(self, values: Mapping[str, Any]) -> int:
        return request_values.whole(values, "seq_id", 1, MOST_NUMBER)

    def _numbered(self, tenant: str, command: Any, body: Body, number: int | None = None) -> dict[str, Any]:
        """Take a command of a model in its order."""
        number = self._number(body.values) if number is None else number
        return self._given(tenant, command, body, f"{command.model}:{number}", command.model, number)

    def _given(
        self, tenant: str, command: Command, body: Body, request: str, lane: str = "", number: int = 0
    ) -> dict[str, Any]:
        """Take a command; returns the future that its client asks for."""
        entry, is_new = self.log.submit(Entry(request, tenant, lane, number, digest_of(body.content), command))
        self.num_changes += is_new
        if is_new and isinstance(command, SaveWeights):
            self._saved[command.path] = SavedPath(tenant, command.model, command.for_sampling)
        return {"request_id": entry.request_id}

    def finish(self, entry: Entry, reply: CommandReply) -> None:
        """Note the reply to a command, and the state or sampler that it has made."""
        command = entry.command
        self.log.finish(entry, reply)
        if isinstance(command, SaveWeights):
            self._saved[command.path] = replace(self._saved[command.path], is_whole=True)
            if command.sampler:
                self._samplers.setdefault(command.sampler, SamplingSession(entry.tenant, command.path))
