"""The keys that go to Megatron's own dataclasses, against the installed ones: there, and of the same type."""

from __future__ import annotations

import dataclasses
import types
import typing

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from megatron_rl.config.megatron import OverrideDDPConfig, OverrideOptimizerConfig, OverrideTransformerConfig


def kinds(annotation: object) -> set[object]:
    """The plain types that a field may have; a choice of values is the type of these."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return {type(value) for value in typing.get_args(annotation)}
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(kinds, typing.get_args(annotation)))
    return {origin or annotation}


@pytest.mark.parametrize(
    ("ours", "megatrons"),
    [
        (OverrideTransformerConfig, TransformerConfig),
        (OverrideDDPConfig, DistributedDataParallelConfig),
        (OverrideOptimizerConfig, OptimizerConfig),
    ],
)
def test_every_option_is_megatrons(ours: type, megatrons: type) -> None:
    """Name and type. Would not catch an option that means something else in another version."""
    theirs = typing.get_type_hints(megatrons)
    for name, annotation in typing.get_type_hints(ours).items():
        assert name in theirs and kinds(annotation) <= kinds(theirs[name]), name
    assert len(dataclasses.fields(ours)) >= 3
