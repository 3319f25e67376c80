"""What answers are worth: the rule's score, and those of the reward models, which score beside whatever else runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from megatron_rl.config.algorithms import needs_of
from megatron_rl.config.roles import RoleSpec, roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.dispatch import Future
from megatron_rl.errors import ConfigError
from megatron_rl.experience.assemble import assemble
from megatron_rl.observe.clock import Clock
from megatron_rl.prompts.dataset import PromptDataset
from megatron_rl.prompts.tokenizer import load_tokenizer
from megatron_rl.records import Generations, Prompts, SequenceScores, known, row_lengths
from megatron_rl.reward.combined import ModelScores, combine
from megatron_rl.reward.overlong import overlong_penalty
from megatron_rl.reward.reader import TextReader
from megatron_rl.reward.rule import NoRule, RuleReward, Scored
from megatron_rl.roles.reward_model import RewardModel


@dataclass(frozen=True)
class PendingScores:
    """Scores of a reward model that are under way. is_cut: bool [B], rows whose end it does not read; None: it reads
    the actor's tokens, which are never cut.
    """

    spec: RoleSpec
    scores: Future[SequenceScores]
    is_cut: torch.Tensor | None

    def get(self) -> ModelScores:
        """Wait for them."""
        return ModelScores(self.spec.name, self.scores.get().scores, self.spec.settings.weight, self.is_cut)


Pending = list[PendingScores]


class Rewards:
    """Scores answers. models: every reward model and its handle. warn: says a line that nobody should miss.

    readers: name -> how a reward model with a tokenizer of its own reads; the others read the actor's tokens.
    """

    def __init__(
        self,
        config: RunConfig,
        rules: RuleReward | NoRule,
        models: list[tuple[RoleSpec, RewardModel]],
        warn: Callable[[str], None],
        clock: Clock,
        readers: Mapping[str, TextReader] | None = None,
    ) -> None:
        self.config, self.rules, self.models = config, rules, models
        is_apart = config.custom_reward_function.validation_only
        self._training_rules = NoRule(rules.tokenizer) if is_apart else rules
        self._rule_weight = 0.0 if is_apart else config.reward_model.rule_weight
        self._readers = dict(readers or {})
        self._warn, self._clock = warn, clock
        self._cut_said: set[str] = set()

    def start(self, prompts: Prompts, generations: Generations) -> Pending:
        """Have every reward model score answers, beside whatever else happens.

        Raises RewardError where one with a chat template of its own cannot read a conversation.
        """
        pending: Pending = []
        # Those that read tokens score while conversations are tokenised for the others.
        for spec, model in sorted(self.models, key=lambda one: one[0].name in self._readers):
            if spec.name not in self._readers:
                sequences = assemble(prompts, generations).sequences()
                pending.append(PendingScores(spec, model.scores(sequences), None))
                continue
            with self._clock.phase("reward"):
                read = self._readers[spec.name].read(prompts, generations)
            self._say_cut(self._readers[spec.name], read.is_cut)
            pending.append(PendingScores(spec, model.scores(read.sequences), read.is_cut))
        return pending

    def _say_cut(self, reader: TextReader, is_cut: torch.Tensor) -> None:
        """The first time; a metric counts them."""
        if is_cut.any() and reader.name not in self._cut_said:
            self._cut_said.add(reader.name)
            self._warn(
                f"{int(is_cut.sum())} of {len(is_cut)} conversations are longer than "
                f"{reader.length_key}={reader.max_length} in tokens of {reader.name}, which does not read their ends"
            )

    def task_scores(self, prompts: Prompts, generations: Generations, pending: Pending) -> Scored:
        """The scores of answers, by the rule while reward models do; says so when the rule could not score some.

        Of held-out prompts, or, where the rule is asked about both, of any. Raises RewardError when it could score
        none, or when a reward model gives no number.
        """
        return self._scores(self.rules, prompts, generations, pending)

    def _scores(
        self, rules: RuleReward | NoRule, prompts: Prompts, generations: Generations, pending: Pending
    ) -> Scored:
        with self._clock.phase("reward"):
            scored = rules(prompts, generations)
            if scored.first_failure is not None:
                failed = sum(outcome.failure != "" for outcome in scored.outcomes)
                first = scored.first_failure
                self._warn(f"{failed} of {len(scored.outcomes)} samples could not be scored; the first: {first}")
            return combine(scored, [one.get() for one in pending], self._rule_weight)

    def training_scores(self, prompts: Prompts, generations: Generations, pending: Pending) -> Scored:
        """What training rewards: the task's scores, less the penalty of overlong answers if configured."""
        scored = self._scores(self._training_rules, prompts, generations, pending)
        overlong = self.config.reward_model.overlong_buffer
        if not overlong.enable:
            return scored
        lengths, longest = row_lengths(generations.response_ids), self.config.data.max_response_length
        penalty = overlong_penalty(lengths, longest, overlong.len, overlong.penalty_factor)
        return dataclasses.replace(scored, scores=scored.scores + penalty)

    def components(self, scored: Scored) -> torch.Tensor | None:
        """float32 [B, K]: of each answer the numbers that `algorithm.gdpo_reward_keys` names; None where the estimator
        takes none. Raises RewardError.
        """
        if not needs_of(self.config).components:
            return None
        keys, failed = self.config.algorithm.gdpo_reward_keys or [], self.config.reward_model.failed_score
        return torch.tensor([scored.numbers(key, failed) for key in keys], dtype=torch.float32).T.contiguous()

    def greedy_scores(self, prompts: Prompts, generations: Generations, pending: Pending) -> torch.Tensor:
        """float32 [B]: for each row of `prompts` the score of its group's answer, in the order of `one_per_group`."""
        _, group = known(prompts.uid).unique(return_inverse=True)
        return self.training_scores(prompts.one_per_group(), generations, pending).scores[group]


def text_readers(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, datasets: Sequence[PromptDataset]
) -> tuple[dict[str, TextReader], list[str]]:
    """The readers of reward models with a tokenizer of their own, by role, and what a user should know of them.

    tokenizer: the actor's. All prompts are read once. Raises ConfigError where a tokenizer cannot be loaded, has more
    tokens than its model, or where prompts cannot be read.
    """
    readers, notes = {}, []
    for role in roles_of(config):
        if not role.reads_text or role.score is None or role.score.longest is None:
            continue
        key, given = f"{role.key}.model.input_tokenizer", role.settings.model.input_tokenizer
        policy = tokenizer if given == config.actor_rollout_ref.model.path else load_tokenizer(given, key)
        own = load_tokenizer(role.model_path, role.model_key)
        largest, size = max(own.get_vocab().values()), AutoConfig.from_pretrained(role.model_path).vocab_size
        if largest >= size:
            raise ConfigError(
                f"{role.model_key}={role.model_path}: its tokenizer has a token of number {largest}, and the "
                f"vocab_size of its config.json is {size}: its files do not go together"
            )
        readers[role.name] = TextReader(role.name, policy, own, role.score.longest, f"{role.key}.max_length")
        conversations, prompt_ids = zip(*(data.texts() for data in datasets), strict=True)
        notes += readers[role.name].check(
            [one for part in conversations for one in part], [ids for part in prompt_ids for ids in part]
        )
    return readers, notes
