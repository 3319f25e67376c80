"""Whether Megatron's options of data-parallel traffic go together, and the hardware file can be used."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_rl.config.megatron import OverrideDDPConfig
from megatron_rl.config.roles import roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import ConfigError, Violation
from megatron_rl.ledger.planner.hardware import load_hardware

OVERLAP, GATHER, BUCKET = "overlap_grad_reduce", "overlap_param_gather", "bucket_size"


def option_problems(config: RunConfig) -> Iterable[Violation]:
    """Of all trained roles, and of the run."""
    yield from _hardware_problems(config.trainer.hardware_file)
    for role in roles_of(config):
        if role.is_trained:
            yield from _ddp_problems(f"{role.key}.megatron.override_ddp_config", role.megatron.override_ddp_config)


def _hardware_problems(file: str | None) -> Iterable[Violation]:
    if file is None:
        return
    key = "trainer.hardware_file"
    try:
        load_hardware(file)
    except ConfigError as error:
        yield Violation({key: file}, f"must be a hardware file: {error}", {key: None})


def _ddp_problems(group: str, ddp: OverrideDDPConfig) -> Iterable[Violation]:
    key = f"{group}.{BUCKET}"
    if ddp.bucket_size is not None and ddp.bucket_size >= 1 and not ddp.overlap_grad_reduce:
        rule = f"needs {OVERLAP}: gradients that are reduced at the end are one bucket"
        yield Violation({key: ddp.bucket_size, f"{group}.{OVERLAP}": False}, rule, {f"{group}.{OVERLAP}": True})
    if ddp.overlap_param_gather and not ddp.overlap_grad_reduce:
        settings = {f"{group}.{GATHER}": True, f"{group}.{OVERLAP}": False}
        rule = f"{GATHER} needs {OVERLAP}: without it there is one bucket to wait for"
        yield Violation(settings, rule, {f"{group}.{OVERLAP}": True})
