"""The state of a service's clients: sessions, models, samplers and saved states, each of one tenant.

A request becomes a command of the log, or is replied to here. The same requests in the same order, at the same times,
give the same names, so that a journal of requests is enough to come back to them. No processes, no clock, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_rl.serve import request_values
from megatron_rl.serve.bad_request import BadRequest, one_of, shown
from megatron_rl.serve.client_commands import (
    Command,
    CreateModel,
    DropCopy,
    LoadWeights,
    OptimStep,
    SaveWeights,
    UnloadModel,
    client_path,
)
from megatron_rl.serve.command_log import CommandLog, CommandReply, Entry
from megatron_rl.serve.protobuf import decoded
from megatron_rl.serve.request_journal import digest_of
from megatron_rl.serve.request_values import ServedModel
from megatron_rl.serve.sample_request import read_sample
from megatron_rl.serve.sampling_sessions import SamplingSessions
from megatron_rl.serve.saved_states import (
    SCHEME,
    ClientState,
    SavedStates,
    as_time,
    new_name,
    read_expiry,
    read_metadata,
)
from megatron_rl.serve.tinker_messages import FORWARD_BACKWARD

MOST_SESSIONS, MOST_MODELS = 1000, 64
"""A tenant's open sessions, and models, whose states are in host memory."""
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
    """A model that a client trains, or has trained until it was unloaded. last_at: its last command's time, in seconds
    since 1970.
    """

    tenant: str
    session: str
    last_at: float
    metadata: Mapping[str, str]
    is_loaded: bool = True


Post = Callable[[str, Body], dict[str, Any]]
REFUSED = (400, 404, 415)
"""Refusals after which a client continues with its next number. After others it sends the same request again."""


class Desk:
    """Checks requests and turns them into commands of a log. One thread at a time may call it."""

    def __init__(self, served: ServedModel, stop_token: Callable[[str], int | None], seed: int) -> None:
        """stop_token: the token that is this text, if one is. seed: of samples whose client has none."""
        self.served, self.log = served, CommandLog()
        self._stop_token, self._seed = stop_token, seed
        self._sessions: dict[str, str] = {}
        self._num_sessions = 0
        self._models: dict[str, ClientModel] = {}
        self._saved = SavedStates(self._drop)
        self._num_drops = 0
        self.now = 0.0
        """Seconds since 1970, of the request that is taken; a caller sets them."""
        self._samplers = SamplingSessions(self._saved)
        self.num_changes, self.is_new = 0, False
        """Number of new requests so far; others change nothing, and a journal leaves them out."""
        self.refused: tuple[str, int] | None = None
        """(model, number) of a request that was refused, so that later ones do not wait for it. A caller clears it."""
        self.posts: dict[str, Post] = {
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._in_lane(self._forward_backward),
            "optim_step": self._in_lane(self._optim_step),
            "save_weights": self._in_lane(self._save_weights),
            "save_weights_for_sampler": self._in_lane(self._save_for_sampler),
            "load_weights": self._in_lane(self._load_weights),
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "weights_info": self._weights_info,
            "unload_model": self._unload_model,
            "finish_session": self._finish_session,
            "delete_checkpoint": self._delete_checkpoint,
            "set_checkpoint_ttl": self._set_checkpoint_ttl,
        }
        """The last part of a path -> what takes a request of it: (tenant, body) -> reply."""

    # Sessions and models

    def _create_session(self, tenant: str, body: Body) -> dict[str, Any]:
        of_key = [name for name, owner in self._sessions.items() if owner == tenant]
        if len(of_key) >= MOST_SESSIONS:
            unused = next((name for name in of_key if not self._is_used(name)), None)
            if unused is None:
                reason = f"each of this key's {len(of_key)} sessions has a model or a sampler"
                raise BadRequest("session", f"{reason}; try: unload_model of one", 429)
            del self._sessions[unused]
        session = f"session-{self._num_sessions}"
        self._sessions[session] = tenant
        self._num_sessions += 1
        self.num_changes += 1
        return {"type": "create_session", "session_id": session}

    def _is_used(self, session: str) -> bool:
        has_model = any(one.session == session and one.is_loaded for one in self._models.values())
        return has_model or bool(self._samplers.of(session))

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
        if not found.is_loaded:
            raise BadRequest("model_id", f"{model} is unloaded; try: a new model from a saved state", 404)
        return model

    def _model_of(self, tenant: str, body: Body) -> str:
        return self._model(tenant, request_values.text(body.values, "model_id"))

    def _create_model(self, tenant: str, body: Body) -> dict[str, Any]:
        values, session = body.values, self._session(tenant, body.values)
        self._check_base(values)
        if (values.get("optimizer_config") or {}).get("type", "adamw") != "adamw":
            raise BadRequest("optimizer_config.type", f"{shown(values['optimizer_config'])} is not served; try: adamw")
        self._check_adapter(lora := values.get("lora_config"))
        seed = request_values.adapter_seed(lora, self.served)
        model = self._new_model(tenant, session, values)
        return self._given(tenant, CreateModel(model, seed=seed), body, f"{model}:create")

    def _unload_model(self, tenant: str, body: Body) -> dict[str, Any]:
        model = request_values.text(body.values, "model_id")
        if not self.log.has(f"{model}:unload"):
            self._model(tenant, model)
            if number := self.log.num_open(model):
                raise BadRequest("model_id", f"{number} commands of {model} have no reply yet; try: later", 409)
        return self._given(tenant, UnloadModel(model), body, f"{model}:unload")

    def _finish_session(self, tenant: str, body: Body) -> dict[str, Any]:
        """Forget the states of a session's models, except for those that still have commands to run."""
        session = self._session(tenant, body.values)
        for model, one in self._models.items():
            if one.session == session and one.is_loaded and not self.log.num_open(model):
                self._given(tenant, UnloadModel(model), body, f"{model}:unload")
        return {}

    def _new_model(self, tenant: str, session: str, values: Mapping[str, Any]) -> str:
        model = f"{session}:train:{request_values.whole(values, 'model_seq_id', 0, MOST_NUMBER)}"
        num_models = sum(one.tenant == tenant and one.is_loaded for one in self._models.values())
        if model not in self._models and num_models >= MOST_MODELS:
            raise BadRequest("model", f"this key has {num_models} models; try: unload_model of one", 429)
        self._models.setdefault(model, ClientModel(tenant, session, self.now, read_metadata(values)))
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
        model, values = self._model_of(tenant, body), body.values
        path = f"{SCHEME}{model}/weights/{new_name(values)}"
        return self._save(tenant, body, path, request_values.flag(values, "overwrite"), "")

    def _save_for_sampler(self, tenant: str, body: Body) -> dict[str, Any]:
        model, values = self._model_of(tenant, body), body.values
        if values.get("kind", "snapshot") != "snapshot":
            raise BadRequest("kind", f"{shown(values['kind'])} is not served; try: snapshot")
        folder, sampler = f"{SCHEME}{model}/sampler_weights", ""
        if values.get("path") is not None:
            return self._save(tenant, body, f"{folder}/{new_name(values)}", overwrite=False, sampler="")
        place = request_values.whole(values, "sampling_session_seq_id", 0, MOST_NUMBER)
        sampler = f"{self._models[model].session}:sample:{place}"
        return self._save(tenant, body, f"{folder}/sampler-{self._number(values)}", overwrite=False, sampler=sampler)

    def _save(self, tenant: str, body: Body, path: str, overwrite: bool, sampler: str) -> dict[str, Any]:
        """Save under a path. The same request may come again."""
        values, model = body.values, body.values["model_id"]
        for_sampling, request = "/sampler_weights/" in path, f"{model}:{self._number(values)}"
        expires_at, metadata = read_expiry(values, self.now), read_metadata(values)
        copy = path if self.log.has(request) else self._saved.next_copy(tenant, path, overwrite)
        given = self._numbered(tenant, SaveWeights(model, copy, for_sampling, sampler), body)
        if self.is_new:
            is_named = not sampler
            state = ClientState(tenant, model, path, for_sampling, copy, self.now, expires_at, metadata, is_named)
            self._saved.add(state)
        return given

    def _load_weights(self, tenant: str, body: Body) -> dict[str, Any]:
        values = body.values
        path, with_optimizer = self._state(tenant, values).copy, request_values.flag(values, "optimizer")
        if values.get("model_id") is not None:
            return self._numbered(tenant, LoadWeights(self._model_of(tenant, body), path, with_optimizer), body)
        session = self._session(tenant, values)
        if values.get("base_model") is not None:
            self._check_base(values)
        model = self._new_model(tenant, session, values)
        return self._given(tenant, CreateModel(model, path, with_optimizer), body, f"{model}:create")

    def _state(self, tenant: str, values: Mapping[str, Any], for_sampling: bool = False) -> ClientState:
        saved = self._saved.find(
            tenant, request_values.text(values, "model_path" if for_sampling else "path"), self.now
        )
        if saved.for_sampling != for_sampling:
            folder = "sampler_weights" if for_sampling else "weights"
            rule = f"{shown(saved.path)} cannot be used for this"
            raise BadRequest("path", f"{rule}; try: one of {SCHEME}.../{folder}/...")
        return saved

    def _weights_info(self, tenant: str, body: Body) -> dict[str, Any]:
        self._saved.find(tenant, body.values.get("tinker_path"), self.now)
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
            weights = self._state(tenant, values, for_sampling=True).path
        else:
            self._check_base(values)
        self.num_changes += self._samplers.make(tenant, sampler, weights)
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def sampler_info(self, tenant: str, name: str) -> dict[str, Any]:
        """Return the weights of a sampling session. Raises BadRequest for one that the tenant does not have."""
        weights = self._samplers.find(tenant, name).weights
        return {"sampler_id": name, "base_model": self.served.base_model, "model_path": weights or None}

    def _sample(self, tenant: str, body: Body) -> dict[str, Any]:
        values = body.values
        name = request_values.text(values, "sampling_session_id")
        request, weights = f"{name}:{request_values.whole(values, 'seq_id', 0, 1 << 62)}", ""
        if self.log.has(request):  # though its weights may be gone
            self._session(tenant, {"session_id": name.partition(":")[0]})
        elif path := self._samplers.find(tenant, name).weights:
            weights = self._saved.find(tenant, path, self.now).copy
        usual_seed = int(digest_of(f"{self._seed},{request}".encode()), 16) >> 1
        command = read_sample(values, weights, usual_seed, self.served, self._stop_token)
        given = self._given(tenant, command, body, request)
        return given | {"sample_sequence_ids": [f"{request}:{place}" for place in range(command.num_samples)]}

    # Commands

    def _number(self, values: Mapping[str, Any]) -> int:
        return request_values.whole(values, "seq_id", 1, MOST_NUMBER)

    def _in_lane(self, post: Post) -> Post:
        """Have the requests that follow a refused one not wait for its number."""

        def noting(tenant: str, body: Body) -> dict[str, Any]:
            try:
                return post(tenant, body)
            except BadRequest as refusal:
                if refusal.status in REFUSED:
                    self._note_refusal(tenant, body)
                raise

        return noting

    def _note_refusal(self, tenant: str, body: Body) -> None:
        with suppress(BadRequest, ValueError):
            values = decoded(body.content, FORWARD_BACKWARD) if body.json is None else body.values
            model, number = self._model(tenant, request_values.text(values, "model_id")), self._number(values)
            if not self.log.has(f"{model}:{number}") and self.log.refuse(tenant, model, number):
                self.refused = model, number

    def _numbered(self, tenant: str, command: Any, body: Body, number: int | None = None) -> dict[str, Any]:
        """Take a command of a model in its order."""
        number = self._number(body.values) if number is None else number
        return self._given(tenant, command, body, f"{command.model}:{number}", command.model, number)

    def _given(
        self, tenant: str, command: Command, body: Body, request: str, lane: str = "", number: int = 0
    ) -> dict[str, Any]:
        """Take a command; returns the future that its client asks for."""
        entry, self.is_new = self.log.submit(Entry(request, tenant, lane, number, digest_of(body.content), command))
        self.num_changes += self.is_new
        if self.is_new:
            self._saved.begin(command)
            model = getattr(command, "model", None)
            if model is not None:
                is_loaded = not isinstance(command, UnloadModel)
                self._models[model] = replace(self._models[model], last_at=self.now, is_loaded=is_loaded)
            if isinstance(command, UnloadModel):
                self._saved.remove_unnamed(command.model)
        return {"request_id": entry.request_id}

    def finish(self, entry: Entry, reply: CommandReply) -> None:
        """Note the reply to a command, and the state or sampler that it has made."""
        command = entry.command
        self.log.finish(entry, reply)
        if isinstance(command, SaveWeights):
            path = client_path(command.path)
            self._saved.saved(path, command.path, reply.content["size_bytes"])
            if command.sampler:
                self._samplers.add_saved(entry.tenant, command.sampler, path)
        self._saved.end(command)

    # Saved states

    def _drop(self, tenant: str, copy: str) -> None:
        self._num_drops += 1
        self.log.submit(Entry(f"drop:{self._num_drops}", tenant, "", 0, "", DropCopy(copy)))

    def _delete_checkpoint(self, tenant: str, body: Body) -> dict[str, Any]:
        self._saved.remove(self._saved.find(tenant, body.values.get("path"), self.now).path)
        self.num_changes += 1
        return {}

    def _set_checkpoint_ttl(self, tenant: str, body: Body) -> dict[str, Any]:
        saved = self._saved.find(tenant, body.values.get("path"), self.now)
        self._saved.set_expiry(saved, read_expiry(body.values, self.now))
        self.num_changes += 1
        return {}

    @property
    def has_due(self) -> bool:
        """Whether a saved state has expired, which `expire` removes."""
        return bool(self._saved.due(self.now))

    def expire(self) -> None:
        """Remove what has expired."""
        for path in self._saved.due(self.now):
            self._saved.remove(path)

    # Snapshots

    @property
    def loaded_models(self) -> list[str]:
        """Models that have a state."""
        return [name for name, one in self._models.items() if one.is_loaded]

    @property
    def copies(self) -> list[str]:
        """Copies that clients can still read."""
        return self._saved.copies

    def kept(self) -> dict[str, Any]:
        """Return the state that another desk restores, as JSON, while no command is open."""
        return {
            "sessions": self._sessions,
            "num_sessions": self._num_sessions,
            "models": {name: asdict(one) for name, one in self._models.items()},
            "samplers": self._samplers.kept(),
            "saved": self._saved.kept(),
            "log": self.log.kept(),
            "num_drops": self._num_drops,
        }

    def renew_log(self) -> None:
        """Forget the commands that `kept` leaves out."""
        kept, self.log = self.log.kept(), CommandLog()
        self.log.restore(kept)

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Continue with what `kept` has returned. The desk must be new."""
        self._sessions = dict(kept["sessions"])
        self._num_sessions = kept.get("num_sessions", len(self._sessions))
        self._models = {name: ClientModel(**one) for name, one in kept["models"].items()}
        self._samplers.restore(kept["samplers"])
        self._saved.restore(kept["saved"])
        self.log.restore(kept["log"])
        self._num_drops = kept["num_drops"]

    # Lists, which change nothing

    def checkpoints(self, tenant: str, model: str | None = None) -> list[dict[str, Any]]:
        """Return the saved states of a tenant: of one training run, whose id is its model's, or of all. Raises
        BadRequest.
        """
        if model is not None:
            self._run(tenant, model)
        return [one.checkpoint for one in self._saved.of_tenant(tenant, self.now, model)]

    def training_runs(self, tenant: str) -> list[dict[str, Any]]:
        """A tenant's training runs, the newest first."""
        return [self.training_run(tenant, name) for name, one in reversed(self._models.items()) if one.tenant == tenant]

    def training_run(self, tenant: str, model: str) -> dict[str, Any]:
        """One training run. Raises BadRequest for one that the tenant does not have."""
        run, rows = self._run(tenant, model), self.checkpoints(tenant, model)
        last = {row["checkpoint_type"]: row for row in rows}
        return {
            "training_run_id": model,
            "base_model": self.served.base_model,
            "model_owner": tenant,
            "is_lora": self.served.rank > 0,
            "lora_rank": self.served.rank or None,
            "last_request_time": as_time(run.last_at),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": dict(run.metadata) or None,
        }

    def _run(self, tenant: str, model: str) -> ClientModel:
        run = self._models.get(model)
        if run is None or run.tenant != tenant:
            raise BadRequest("training_run_id", f"{shown(model)} is no training run of this key", 404)
        return run

    def sessions(self, tenant: str) -> list[str]:
        """A tenant's sessions, the newest first."""
        return [name for name, owner in reversed(self._sessions.items()) if owner == tenant]

    def session(self, tenant: str, name: str) -> dict[str, Any]:
        """Models and samplers of a session. Raises BadRequest for one that the tenant does not have."""
        self._session(tenant, {"session_id": name})
        models = [model for model, one in self._models.items() if one.session == name]
        return {"training_run_ids": models, "sampler_ids": self._samplers.of(name)}
