"""Faults of model folders, for the catalogue. What cannot be read keeps no rules of layout and length."""

from __future__ import annotations

from random import Random

from fault import CATALOGUE, ETP, MODEL, ROLLOUT_TP, Case, Fault, Said, fault
from model_folders import safetensors, write_model


def model_fault(
    name: str, changes: dict[str, object], *said: Said, areas: str = "model", offer=True, experts=None
) -> None:
    """A fault of config.json; None takes a key out."""

    def breaks(case: Case, rng: Random) -> list[Said]:
        case.model(**changes)
        return list(said)

    CATALOGUE.append(Fault(name, frozenset(areas.split()), breaks, offer, experts))


UNREADABLE = "model layout length"
model_fault("activation", {"hidden_act": "gelu"}, ("hidden_act", "is not supported"))
model_fault("biases", {"attention_bias": True}, ("attention_bias", "is not supported"))
model_fault("rope", {"rope_parameters": {"rope_type": "yarn"}}, ("rope_parameters", "cannot be used"), offer=False)
model_fault("layer types", {"layer_types": ["chunked_attention"] * 6}, ("layer_types", "not supported"))
model_fault(
    "uneven groups",
    {"num_key_value_heads": 8},
    ("num_key_value_heads", "num_attention_heads(12)"),
    areas=UNREADABLE,
    experts=False,
)
model_fault("uneven heads", {"hidden_size": 390}, ("num_attention_heads", "hidden_size(390)"), areas=UNREADABLE)
model_fault("heads of 20", {"head_dim": 20}, (MODEL, "must be one of 32, 48"), areas=UNREADABLE, offer=False)
model_fault(
    "no layers", {"num_hidden_layers": None}, ("num_hidden_layers", "whole numbers"), areas=UNREADABLE, offer=False
)
model_fault(
    "architecture",
    {"architectures": ["Qwen2ForCausalML"]},
    ("architectures", "must be one of"),
    areas=UNREADABLE,
    experts=False,
)
model_fault(
    "window",
    {"use_sliding_window": True, "sliding_window": 63},
    ("data.max_prompt_length", "sliding_window(63)"),
    areas=UNREADABLE,
)
model_fault("too many experts", {"num_experts_per_tok": 9}, ("num_experts_per_tok", "<= num_experts(8)"), experts=True)
model_fault("one expert", {"num_experts_per_tok": 1}, ("num_experts_per_tok", "without a gradient"), experts=True)
model_fault(
    "experts' columns",
    {"moe_intermediate_size": 21},
    (ETP, "must divide moe_intermediate_size(21)"),
    (ROLLOUT_TP, "moe_intermediate_size(21)"),
    areas=UNREADABLE,
    experts=True,
)


@fault("model", offer=False, experts=None)
def no_weights(case: Case, rng: Random) -> list[Said]:
    (case.folder / "model" / "model.safetensors").unlink()
    return [(MODEL, "must hold *.safetensors")]


@fault("model", offer=False, experts=None)
def no_tokenizer(case: Case, rng: Random) -> list[Said]:
    (case.folder / "model" / "tokenizer.json").unlink()
    return [(MODEL, "must hold a tokenizer")]


def model_file(name: str, file: str, content: bytes, rule: str, areas: str = "model", role: str = "model") -> None:
    """A damaged file in the actor's folder, or in one of the critic's own."""

    def breaks(case: Case, rng: Random) -> list[Said]:
        key = MODEL
        if role == "critic":
            key = "critic.model.path"
            case.set({key: write_model(case.folder / "critic")})
        (case.folder / role / file).write_bytes(content)
        return [(key, rule)]

    CATALOGUE.append(Fault(name, frozenset(areas.split()), breaks, False, False if role == "critic" else None))


WEIGHTS, CONFIG, INDEX = "model.safetensors", f"{UNREADABLE} critic", "model.safetensors.index.json"
model_file("cut weights", WEIGHTS, safetensors(64)[:-4], "it was cut off")
model_file(
    "cut weights of the critic", WEIGHTS, safetensors(64)[:-64], "it was cut off", "model critic layout", "critic"
)
model_file(
    "files beside the list",
    "SHA256SUMS",
    b"",
    "SHA256SUMS does not list config.json, model.safetensors, tokenizer.json",
)
model_file("lost files", INDEX, b'{"weight_map": {"a": "b.safetensors"}}', "missing: b.safetensors")
model_file("cut tokenizer", "tokenizer.json", b'{"model": {"vo', "tokenizer.json is not valid JSON")
model_file("no end of an answer", "generation_config.json", b"{}", "eos_token_id must be a token id")
model_file("a list of settings", "config.json", b"[1]", "is not an object in braces", CONFIG)
model_fault("hidden", {"hidden_size": 10**30}, ("hidden_size", "<= 16777216"), areas=CONFIG, offer=False)
model_fault("heads", {"num_attention_heads": 10**9}, ("num_attention_heads", "<= 10000"), areas=CONFIG, offer=False)
model_fault("no names", {"architectures": 5}, ("architectures", "must be a list"), areas=CONFIG, offer=False)


@fault(f"{UNREADABLE} critic", offer=False, experts=None)
def broken_json(case: Case, rng: Random) -> list[Said]:
    (case.folder / "model" / "config.json").write_text("{")
    return [(MODEL, "is not valid JSON")]


@fault(f"{UNREADABLE} critic")
def no_model(case: Case, rng: Random) -> list[Said]:
    case.set({MODEL: str(case.folder / "modle")})
    return [(MODEL, "it does not exist")]


@fault(f"{UNREADABLE} critic")
def other_tokens(case: Case, rng: Random) -> list[Said]:
    case.set({"critic.model.path": write_model(case.folder / "critic", vocab_size=200)})
    return [("critic.model.path", "read the same tokens")]


@fault(f"{UNREADABLE} critic", experts=None)
def no_critic_folder(case: Case, rng: Random) -> list[Said]:
    case.set({"critic.model.path": str(case.folder / "modell")})
    return [("critic.model.path", "it does not exist")]
