"""Commands of clients to a service, after every check that needs no weights. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A datum. token_ids: its input and the last target behind it. weights: each target's, or its advantage.
    log_probs: given ones, and counted: 1 where a target counts, else 0; each empty where the loss reads none.
    """

    token_ids: tuple[int, ...]
    weights: tuple[float, ...]
    log_probs: tuple[float, ...] = ()
    counted: tuple[float, ...] = ()


@dataclass(frozen=True)
class CreateModel:
    """A new model, as the service's model is at its start. path: from the copy that a client has saved. seed: gives
    its adapters their initial values; None: they begin as at the service's start.
    """

    model: str
    path: str = ""
    with_optimizer: bool = False
    seed: int | None = None


@dataclass(frozen=True)
class ForwardBackward:
    """A forward pass, and a backward one unless forward_only, over rows."""

    model: str
    loss: str
    settings: Mapping[str, float]
    rows: tuple[Row, ...]
    forward_only: bool = False


@dataclass(frozen=True)
class OptimStep:
    """A step of Adam. adam: fields of `AdamStep`."""

    model: str
    adam: Mapping[str, float]


@dataclass(frozen=True)
class SaveWeights:
    """Keep a copy of the state, or of the weights alone, for sampling. path: the copy's name: the client's path, and
    behind `~` a number where that was saved before. sampler: the sampling session that reads them; "" for none.
    """

    model: str
    path: str
    for_sampling: bool
    sampler: str = ""


@dataclass(frozen=True)
class LoadWeights:
    """Continue with a copy."""

    model: str
    path: str
    with_optimizer: bool


@dataclass(frozen=True)
class SampleTokens:
    """Sequences that continue a prompt. weights: the copy of those that sample; "" for the model as the service starts.
    stop: tokens that end a sequence; None: the model's end tokens. stop_texts: texts that do. prompt_log_probs: also
    return the prompt's. prompt_top: also return that many likeliest tokens for each place of the prompt.
    """

    weights: str
    prompt: tuple[int, ...]
    num_samples: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: tuple[int, ...] | None = None
    prompt_log_probs: bool = False
    prompt_top: int = 0
    stop_texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class UnloadModel:
    """Forget a model's state."""

    model: str


@dataclass(frozen=True)
class DropCopy:
    """Forget a copy, which no other command needs."""

    copy: str


def client_path(copy: str) -> str:
    """The path under which a client has saved a copy."""
    return copy.partition("~")[0]


Command = CreateModel | ForwardBackward | OptimStep | SaveWeights | LoadWeights | SampleTokens | UnloadModel | DropCopy
