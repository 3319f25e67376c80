"""One role of a run as plain data: its passes, its place, its model, and the roles whose weights it takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.lora import LoraConfig
from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.config.role_kinds import Head, RoleKind
from megatron_rl.config.rollout_keys import MTPUse


@dataclass(frozen=True)
class PassCall:
    """The method of a role's class that makes a pass, and the columns of its batch.

    reads: readers of `columns` whose columns the batch has; (): a batch that its task makes. made_up: columns without
    which the method cannot be, that a rehearsal makes up. makes: the column of a score. is_added: the score is a call
    for every batch of PPO and adds that column, with nothing else around it. compares: a row of the batch has several
    responses.
    """

    method: str
    reads: tuple[str, ...] = ()
    makes: str | None = None
    is_added: bool = False
    compares: bool = False
    made_up: tuple[str, ...] = ()


@dataclass(frozen=True)
class PassSpec:
    """One pass of a role over a batch, and how the batch is cut into micro-batches.

    phase: its name in timings, in memory and in plans, which no other pass of a run has. num_rows: samples of a
    micro-batch, if max_tokens is None. max_tokens: tokens of a micro-batch, if samples are joined by their tokens. key:
    the key of the one that counts. extra_tokens: tokens that the role reads beyond prompt and response. longest: tokens
    of the longest sequence without these, if it is not prompt and response (conversations that are tokenised again,
    responses that stay together). length_key: the settings that make it so long. scored: tokens of that sequence whose
    log-probs are needed; None: those of the longest response. as_tree: rows of a micro-batch are laid as a trie.
    is_run: a step runs the pass, for which there is memory in any case.
    """

    phase: str
    call: PassCall
    num_rows: int
    max_tokens: int | None
    remove_padding: bool
    key: str
    extra_tokens: int = 0
    longest: int | None = None
    length_key: str = ""
    scored: int | None = None
    as_tree: bool = False
    is_run: bool = True


@dataclass(frozen=True)
class Mixed:
    """Examples that join the samples of every optimizer step. longest: tokens of the longest one; all may count."""

    num_examples: int
    longest: int


@dataclass(frozen=True)
class Following:
    """Settings of a role that takes the weights of `leader`, a role of another pool.

    share: part of the leader's weights in the new ones, in (0, 1]. every: steps from one transfer to the next. is_kept:
    checkpoints keep the role's weights; else these are always the leader's.
    """

    leader: str
    share: float
    every: int
    is_kept: bool


@dataclass(frozen=True)
class RoleSpec:
    """One role. key: the group of its settings. model_path: the Hugging Face folder it starts from.

    megatron: its training layout; for the rollout the actor's, which names the dtype. score, update: its passes; a role
    with `update` is trained and saved. settings: the group itself. mixed: further examples that its update reads.
    lora: the adapters that are trained in place of the weights, read by the rollout, or those that a reference holds;
    rank 0: none. model_of: the role on the same ranks whose model is this role's, a reference's with other adapters or
    none; None: it has a model of its own. mtp: what becomes of the model's multi-token prediction layer. follows: whose
    weights it takes by a transfer between pools, and when; None: it keeps its own.
    """

    name: str
    kind: RoleKind
    key: str
    pool: str
    model_path: str
    model_key: str
    megatron: MegatronConfig
    settings: Any
    score: PassSpec | None = None
    update: PassSpec | None = None
    mixed: Mixed | None = None
    lora: LoraConfig = field(default_factory=LoraConfig)
    model_of: str | None = None
    mtp: MTPUse = MTPUse.NONE
    follows: Following | None = None

    def __post_init__(self) -> None:
        places = {"score": self.kind.scored, "update": self.kind.updated}
        for label in self.phases:
            if places[label] is None:
                raise ValueError(f"role {self.name} has a pass {label}; kind {self.kind.name} has no place for it")

    @property
    def is_trained(self) -> bool:
        return self.update is not None

    @property
    def trains_tower(self) -> bool:
        """Whether the vision tower next to its language model is trained, too."""
        return self.is_trained and self.kind.is_sampled and not self.megatron.freeze_vision_model

    @property
    def is_actor(self) -> bool:
        """Whether this is a teacher that is the actor in every step."""
        return self.kind.teaches and (self.model_of is not None or self.follows is not None)

    @property
    def has_value_head(self) -> bool:
        """Whether the model ends in a head of one value instead of one logit for each token of the vocabulary."""
        return self.kind.head is Head.VALUE

    @property
    def reads_text(self) -> bool:
        """Whether this is a reward model that tokenises conversations with its own tokenizer."""
        return self.kind.may_read_text and self.settings.model.input_tokenizer is not None

    @property
    def reads_own_prompts(self) -> bool:
        """Whether this is a teacher that reads other prompts than the policy."""
        return self.kind.teaches and self.settings.prompt_key is not None

    @property
    def passes(self) -> list[PassSpec]:
        """The passes of the role, scoring first."""
        return [spec for spec in (self.score, self.update) if spec is not None]

    @property
    def phases(self) -> dict[str, str]:
        """ "score" and "update" -> the phase of that pass, for the passes that the role has."""
        passes = {"score": self.score, "update": self.update}
        return {label: spec.phase for label, spec in passes.items() if spec is not None}
