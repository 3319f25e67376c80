"""Rules of lengths: the longest sequence against what models can read, and against the tokens of one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_rl.config.keys import value_of
from megatron_rl.config.roles import pretraining_length, roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.planning.folder_checks import ModelSizes

LIMIT = "max_position_embeddings"
OVERRIDE = f"actor_rollout_ref.model.override_config.{LIMIT}"


def length_problems(config: RunConfig, models: list[ModelSizes]) -> Iterable[Violation]:
    """Prompt and response of PPO, texts of reward models, and vocabularies of models that read the same tokens."""
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    keys = {"data.max_prompt_length": prompt, "data.max_response_length": response}
    yield from _pack_problems(config)
    yield from _text_length_problems(config, models)
    yield from _teacher_problems(config, models)
    yield from _judge_problems(config, models)
    readers = {role.model_path for role in roles_of(config) if not (role.reads_text or role.kind.judges)}
    models = [model for model in models if model.path in readers]
    for model in models:
        for name, limit in _limits(config, model):
            if min(prompt, response) < 1 or prompt + response <= limit:
                continue
            key, room = ("response", limit - prompt) if prompt < limit else ("prompt", limit - response)
            nearest = {f"data.max_{key}_length": room}
            if room < 1:
                nearest = {"data.max_prompt_length": limit - limit // 2, "data.max_response_length": limit // 2}
            hint = f"{OVERRIDE} is for models that are trained beyond it" if name == LIMIT else ""
            subject = f"data.max_prompt_length={prompt} + data.max_response_length={response}"
            yield Violation(keys, f"must be <= {name}({limit}) of {model.path}", nearest, hint, subject=subject)
    if len({model.vocab_size for model in models}) > 1:
        yield from _vocabulary_problems(config, models)


def task_length_problems(config: RunConfig, models: list[ModelSizes]) -> Iterable[Violation]:
    """`data.max_length` of tasks without generation. Responses that stay together are counted when files are read."""
    key, longest = "data.max_length", config.data.max_length
    if longest is None or longest < 2:
        return
    for model in models:
        yield from _too_long(config, model, key, longest)
    for role in roles_of(config):
        for spec in role.passes:
            if spec.max_tokens is not None:
                ranks, tokens = role.megatron.context_parallel_size, value_of(config, spec.key)
                yield from _too_few_tokens(spec.key, tokens, ranks, longest, f"{key}({longest})")


def pretraining_length_problems(config: RunConfig, models: list[ModelSizes]) -> Iterable[Violation]:
    """`ptx.max_length`, if it is longer than prompt and response, whose own rules are enough otherwise."""
    key, longest = "ptx.max_length", pretraining_length(config)
    if config.ptx.max_length is None or longest <= config.longest_sequence or longest < 2:
        return
    actor = next(roles_of(config))
    for model in (model for model in models if model.path == actor.model_path):
        yield from _too_long(config, model, key, longest)
    if actor.update is not None and actor.update.max_tokens is not None:
        ranks = actor.megatron.context_parallel_size
        yield from _too_few_tokens(actor.update.key, actor.update.max_tokens, ranks, longest, f"{key}({longest})")


def _limits(config: RunConfig, model: ModelSizes) -> Iterator[tuple[str, int]]:
    """Names and sizes of the longest sequences that a model reads; override_config replaces config.json's."""
    override = config.actor_rollout_ref.model.override_config.max_position_embeddings
    longest = model.longest if override is None else {OVERRIDE: override}
    yield from (longest | model.windows).items()


def _too_long(config: RunConfig, model: ModelSizes, key: str, longest: int) -> Iterator[Violation]:
    for name, limit in _limits(config, model):
        if longest > limit:
            yield Violation({key: longest}, f"must be <= {name}({limit}) of {model.path}", {key: limit})


def _too_few_tokens(key: str, tokens: int, ranks: int, longest: int, named: str) -> Iterator[Violation]:
    """A pass of `tokens` per rank into which one sequence does not fit. named: what the message calls its length."""
    if min(tokens, ranks, longest) >= 1 and tokens * ranks < longest:
        rule = f"must be >= {named}{f' / cp({ranks})' if ranks > 1 else ''}"
        yield Violation({key: tokens}, rule, {key: -(-longest // ranks)})


def _pack_problems(config: RunConfig) -> Iterable[Violation]:
    """The longest sequence must fit into one pass, over all ranks that share it."""
    lengths = (config.data.max_prompt_length, config.data.max_response_length)
    passes = [(spec, role) for role in roles_of(config) for spec in role.passes if spec.max_tokens is not None]
    sizes = {spec.key: role.megatron.context_parallel_size for spec, role in passes}
    for key, own, length_key in dict.fromkeys((spec.key, spec.longest, spec.length_key) for spec, _ in passes):
        # The configured limit: a pass makes room for what its role reads beyond the longest sequence.
        longest, what = sum(lengths), "data.max_prompt_length + data.max_response_length"
        if own not in (None, longest):
            longest, what = own, length_key
        if min(lengths) >= 1:
            named = f"({what}) / cp({sizes[key]}) = {longest}" if sizes[key] > 1 else f"{what} = {longest}"
            yield from _too_few_tokens(key, value_of(config, key), sizes[key], longest, named)


def _text_length_problems(config: RunConfig, models: list[ModelSizes]) -> Iterable[Violation]:
    """Conversations that reward models tokenise again."""
    by_path = {model.path: model for model in models}
    for role in roles_of(config):
        model, longest = by_path.get(role.model_path), role.score.longest if role.score is not None else None
        if model is None or longest is None or not role.reads_text:
            continue
        key = f"{role.key}.max_length"
        for name, limit in model.longest.items():
            if longest > limit:
                rule = f"must be <= {name}({limit}) of {model.path}"
                if role.settings.max_length is None:
                    rule += f"; null is data.max_prompt_length + data.max_response_length = {longest}"
                yield Violation({key: role.settings.max_length}, rule, {key: limit})


def _teacher_problems(config: RunConfig, models: list[ModelSizes]) -> Iterable[Violation]:
    """Longer prompts that teachers read in place of the policy's."""
    by_path, response = {model.path: model for model in models}, config.data.max_response_length
    for role in roles_of(config):
        model = by_path.get(role.model_path)
        if not role.reads_own_prompts or model is None or response < 1:
            continue
        prompt, key = role.settings.max_prompt_length, f"{role.key}.max_prompt_length"
        if prompt <= max(config.data.max_prompt_length, 0):
            continue
        for name, limit in _limits(config, model):
            if prompt + response > limit > response:
                rule = f"and data.max_response_length={response} must be <= {name}({limit}) of {model.path} together"
                yield Violation({key: prompt}, rule, {key: limit - response})


def _judge_problems(config: RunConfig, models: list[ModelSizes]) -> Iterable[Violation]:
    """What judges of a model of their own read and write."""
    by_path = {model.path: model for model in models}
    for role in roles_of(config):
        model = by_path.get(role.model_path)
        if not role.kind.judges or model is None:
            continue
        prompt, response = role.settings.judge.max_prompt_length, role.settings.judge.max_response_length
        keys = {f"{role.key}.judge.max_prompt_length": prompt, f"{role.key}.judge.max_response_length": response}
        for name, limit in model.longest.items():
            if prompt + response > limit:
                nearest = {next(iter(keys)): limit - response} if limit > response else {}
                yield Violation(keys, f"must be <= {name}({limit}) of {model.path} together", nearest)


def _vocabulary_problems(config: RunConfig, models: list[ModelSizes]) -> Iterable[Violation]:
    """One violation for each role whose vocabulary has another size than the actor's."""
    sizes = ", ".join(f"{model.vocab_size} of {model.path}" for model in models)
    rule = f"and the actor's read the same tokens, so their vocab_size must be equal: {sizes}"
    actor_path, vocabularies = config.actor_rollout_ref.model.path, {model.path: model.vocab_size for model in models}
    for role in roles_of(config):
        key, path = role.model_key, role.model_path
        reads_tokens = role.has_value_head and not role.reads_text and {actor_path, path} <= vocabularies.keys()
        if reads_tokens and vocabularies[path] != vocabularies[actor_path]:
            # A language model gives no rewards, but a reward model can read text.
            nearest = {f"{role.key}.model.input_tokenizer" if role.kind.may_read_text else key: actor_path}
            yield Violation({key: path}, rule, nearest)
