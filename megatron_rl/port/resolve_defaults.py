"""Settings of a translated script that follow from several keys, from the models, or from verl's defaults."""

from __future__ import annotations

from typing import Any

from megatron_rl.config.json_files import UnreadableFileError
from megatron_rl.config.keys import CORRECTION
from megatron_rl.config.megatron import LAYOUT_KEYS
from megatron_rl.config.schema import as_list
from megatron_rl.config.setting import Setting
from megatron_rl.config.verl_compat.default_differences import verl_defaults
from megatron_rl.config.verl_compat.key_rows import alike
from megatron_rl.config.verl_compat.translate import Kind, Note
from megatron_rl.planning.config_json import feature_of, is_size
from megatron_rl.planning.feature_rows import FEATURES
from megatron_rl.planning.feature_rows.adapter_rows import ROUTED
from megatron_rl.planning.features import CUDA
from megatron_rl.planning.file_rules import columns_not_text
from megatron_rl.planning.folder_checks import STARTING_POINTS
from megatron_rl.planning.folder_files import different_tokens
from megatron_rl.planning.hub_cache import model_facts, model_folder
from megatron_rl.planning.length_rules import OVERRIDE

ORIGIN = "verl's default"
ACTOR = "actor_rollout_ref.actor"
FOLLOWERS = ("actor_rollout_ref.ref", "critic", "reward_model")
TEXT_KEY = "reward_model.model.input_tokenizer"
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
IMAGES, RANK = "data.image_key", "actor_rollout_ref.model.lora.rank"
WITH_IMAGES = {IMAGES: "images", f"{ACTOR}.megatron.freeze_vision_model": False}
"""Keys that ask for what verl does where rows have images."""
LAYOUT_DEFAULTS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
}


def resolve_defaults(settings: list[Setting]) -> tuple[list[Setting], list[Note]]:
    """Return the settings of a ported file, and notes of those that are changed or left out."""
    notes: list[Note] = []
    for step in (_one_layout, _rewards_of_a_model, _models, _reading, _parts_of_rewards, _corrected, _dense_adapters):
        settings, added = step(settings)
        notes += added
    return settings, [*notes, *_rows(settings)]


def unread_models(settings: list[Setting]) -> list[str]:
    """Return a line for each model whose config.json cannot be read here: families and lengths follow from it."""
    paths: dict[str, list[str]] = {}
    for setting in settings:
        if setting.key.endswith("model.path") and isinstance(setting.value, str):
            paths.setdefault(setting.value, []).append(setting.key)
    lines = []
    for path, keys in paths.items():
        try:
            folder = model_folder(path)
            _ = folder.settings
        except UnreadableFileError as error:
            lines.append(f"{', '.join(keys)}={path}: {folder.path}/{error}")
        except (OSError, RuntimeError) as error:
            lines.append(f"{', '.join(keys)}={path}: {error}")
    return lines


def _rows(settings: list[Setting]) -> list[Note]:
    """Note files that can be read here and have columns of images, videos or sounds that are not read."""
    notes, read = [], {setting.value for setting in settings if setting.key == "data.image_key"}
    for setting in settings:
        if setting.key not in ("data.train_files", "data.val_files") or not isinstance(setting.value, str | list):
            continue
        for path in [path for path in as_list(setting.value) if isinstance(path, str)]:
            columns = ", ".join(name for name in columns_not_text(path) if name not in read)
            if columns:
                reason = f"{path} has {columns}: rows with something in it are refused"
                reason += ", unless data.image_key names a column of images"
                notes.append(Note(Kind.DIFFERS, setting, reason))
    return notes


def _experts_whole(settings: list[Setting]) -> list[Setting]:
    """verl's default of expert_tensor_parallel_size is 1; here it is the tensor parallel size."""
    given = {setting.key for setting in settings}
    ep, etp = (f"{ACTOR}.megatron.expert_{name}_parallel_size" for name in ("model", "tensor"))
    return [Setting(etp, 1, ORIGIN)] if ep in given and etp not in given else []


def defaults(settings: list[Setting]) -> list[Setting]:
    """verl's defaults of keys that a script does not set and whose defaults differ here."""
    given = {setting.key: setting.value for setting in settings}
    values = {"trainer.device": "cuda", **given}
    added = []
    for default in verl_defaults():
        counts = all(alike(values.get(key), value) for key, value in default.counts_if.items())
        if default.is_ported and default.key not in given and counts:
            added.append(Setting(default.key, default.verl, ORIGIN))
    return added + _experts_whole(settings)


def _one_layout(settings: list[Setting]) -> tuple[list[Setting], list[Note]]:
    """Leave out layouts of other models than the actor: models of one pool share its layout, with the same results."""
    given = {setting.key: setting.value for setting in settings}
    own_pool = bool(given.get("reward_model.enable_resource_pool"))
    reason = "models that share ranks share the actor's layout; their results do not depend on it"
    kept, notes = [], []
    for setting in settings:
        role, _, name = setting.key.partition(".megatron.")
        others = [other for other in FOLLOWERS if not (other == "reward_model" and own_pool)]
        actors = given.get(f"{ACTOR}.megatron.{name}", LAYOUT_DEFAULTS.get(name))
        if role in others and name in LAYOUT_KEYS and not alike(setting.value, actors):
            notes.append(Note(Kind.IGNORED, setting, reason))
        else:
            kept.append(setting)
    return kept, notes


def _models(settings: list[Setting]) -> tuple[list[Setting], list[Note]]:
    """Note models that are not here, as far as their config.json can be read, and allow longer sequences than it."""
    given = {setting.key: setting for setting in settings}
    actor, reward = given.get("actor_rollout_ref.model.path"), given.get("reward_model.model.path")
    facts = {model.key: model_facts(str(model.value)) for model in (actor, reward) if model is not None}
    notes = []
    for setting in (actor, reward):
        names = facts[setting.key].get("architectures") or [] if setting is not None else []
        family = STARTING_POINTS.get(names[0]) if names else None
        inside = None if family is None else family.inside
        asks = inside is not None and (not inside.is_only_form or IMAGES in given)
        if setting is not None and setting is actor and inside is not None and inside.tower is not None and asks:
            frozen = RANK in given and given[RANK].value  # adapters are of the language model
            added = {key: value for key, value in WITH_IMAGES.items() if key not in given and (value or not frozen)}
            settings = [*settings, *(Setting(key, value, setting.origin) for key, value in added.items())]
            reason = "verl reads images where rows have some, and trains the tower; here keys ask for both"
            notes.append(Note(Kind.RENAMED, setting, reason, {setting.key: setting.value} | added))
        elif setting is not None and inside is not None and inside.is_only_form:
            notes.append(
                Note(Kind.DIFFERS, setting, "its language model alone is trained; data.image_key is for images")
            )
        elif setting is not None and names and (family is None or inside is not None):
            reason = "docs/scale/models.md lists the supported models"
            feature = f"{feature_of(names[0])} ({names[0]})"
            notes.append(Note(Kind.UNSUPPORTED, setting, reason, feature=feature))
    if actor is not None and not any(note.kind is Kind.UNSUPPORTED for note in notes):
        longer, more = _longer(settings, given, facts[actor.key])
        return longer, [*notes, *more]
    return settings, notes


def _reading(settings: list[Setting]) -> tuple[list[Setting], list[Note]]:
    """Set how a reward model reads. verl's default is text; here a model with the actor's tokens reads tokens."""
    given = {setting.key: setting for setting in settings}
    actor, reward = given.get("actor_rollout_ref.model.path"), given.get("reward_model.model.path")
    enable, text, most = (
        given.get(f"reward_model.{name}") for name in ("enable", "model.input_tokenizer", "max_length")
    )
    notes: list[Note] = []
    if actor is None or reward is None or enable is None or enable.value is not True:
        return settings, notes
    if text is None and _other_tokens(str(actor.value), str(reward.value)):
        text = Setting(TEXT_KEY, actor.value, reward.origin)
        reason = "it has another tokenizer, and reads conversations as text, with its own chat template"
        notes.append(Note(Kind.RENAMED, reward, reason, {reward.key: reward.value, TEXT_KEY: actor.value}))
        settings = [*settings, text]
    if most is not None and most.value is not None and (text is None or text.value is None):
        notes.append(Note(Kind.IGNORED, most, "it is about text, and this reward model reads the actor's tokens"))
        settings = [setting for setting in settings if setting is not most]
    return settings, notes


def _other_tokens(actor: str, reward: str) -> bool:
    """Return True where the folders show that a reward model cannot read the actor's tokens."""
    sizes = {model_facts(path).get("vocab_size") for path in (actor, reward)} - {None}
    return len(sizes) > 1 or any(different_tokens(model_folder(actor), model_folder(reward)))


def _longer(
    settings: list[Setting], given: dict[str, Setting], facts: dict[str, Any]
) -> tuple[list[Setting], list[Note]]:
    """Allow sequences longer than config.json says: verl's recipes for such models ask users to change it by hand."""
    prompt, response = (given.get(f"data.max_{name}_length") for name in ("prompt", "response"))
    limit, key = facts.get("max_position_embeddings"), OVERRIDE
    if prompt is None or response is None or not is_size(limit) or key in given:
        return settings, []
    if not (is_size(prompt.value) and is_size(response.value)) or prompt.value + response.value <= limit:
        return settings, []
    longest = prompt.value + response.value
    reason = f"the model's config.json allows {limit} tokens, which for this script would have to be changed by hand"
    note = Note(Kind.RENAMED, response, reason, {response.key: response.value, key: longest})
    return [*settings, Setting(key, longest, response.origin)], [note]


def _rewards_of_a_model(settings: list[Setting]) -> tuple[list[Setting], list[Note]]:
    """Switch the rule off where a reward model judges: in verl it replaces the rule, here their scores would add up."""
    given = {setting.key: setting for setting in settings}
    enable, path = given.get("reward_model.enable"), given.get("custom_reward_function.path")
    if enable is None or enable.value is not True or (path is not None and path.value is not None):
        return settings, []
    key = "custom_reward_function.name"
    kept = [setting for setting in settings if setting.key != key]
    note = Note(Kind.RENAMED, enable, "the reward model judges alone, as in verl", {enable.key: True, key: None})
    return [*kept, Setting(key, None, enable.origin)], [note]


def _parts_of_rewards(settings: list[Setting]) -> tuple[list[Setting], list[Note]]:
    """Leave out norm_adv_by_std_in_grpo=false for gdpo: verl's gdpo divides by standard deviations all the same."""
    given = {setting.key: setting for setting in settings}
    norm, estimator = (given.get(f"algorithm.{name}") for name in ("norm_adv_by_std_in_grpo", "adv_estimator"))
    if norm is None or norm.value is not False or estimator is None or estimator.value != "gdpo":
        return settings, []
    reason = "verl's gdpo divides by the standard deviation all the same; set it again to have it obeyed"
    return [setting for setting in settings if setting is not norm], [Note(Kind.IGNORED, norm, reason)]


def _corrected(settings: list[Setting]) -> tuple[list[Setting], list[Note]]:
    """Turn on importance weights where a script asks for a feature that needs them."""
    given = {setting.key: setting for setting in settings}
    other = FEATURES["importance_weights"]
    for row in FEATURES.values():
        why = next((pair.why for pair in row.needs if pair.other == other.name), None)
        asked = [given[key] for key, value in row.turned_on.items() if key in given and given[key].value == value]
        weighs = any(given[key].value for key in (*other.turned_on, f"{CORRECTION}.bypass_mode") if key in given)
        if why is not None and asked and not weighs:
            note = Note(Kind.RENAMED, asked[0], why, {one.key: one.value for one in asked} | other.turned_on)
            kept = [setting for setting in settings if setting.key not in other.turned_on]
            return [*kept, *(Setting(key, value, asked[0].origin) for key, value in other.turned_on.items())], [note]
    return settings, []


def _dense_adapters(settings: list[Setting]) -> tuple[list[Setting], list[Note]]:
    """Give no adapters to routed experts of models on a device on which they are refused."""
    given = {setting.key: setting for setting in settings}
    notes: list[Note] = []
    device = given["trainer.device"].value if "trainer.device" in given else CUDA
    if not FEATURES["expert_adapters"].is_refused_on(str(device)):
        return settings, notes
    for group in ("actor_rollout_ref", "critic"):
        rank, path = given.get(f"{group}.model.lora.rank"), given.get(f"{group}.model.path")
        key = f"{group}.model.lora.exclude_modules"
        asked = given[key].value if key in given else []
        facts = {} if path is None else model_facts(str(path.value))
        has_experts = any(facts.get(name) for name in EXPERT_COUNTS)
        if rank is None or not rank.value or not has_experts or not isinstance(asked, list):
            continue
        settings = [setting for setting in settings if setting.key != key]
        settings.append(Setting(key, [*asked, ROUTED], rank.origin))
        reason = "adapters of routed experts have run on CPUs alone; other linears have theirs"
        notes.append(Note(Kind.RENAMED, rank, reason, {rank.key: rank.value, key: [*asked, ROUTED]}))
    return settings, notes
