"""What one GPU and its links can do, from a small file: data-sheet numbers, and one share that is calibrated."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_rl.config.problems import nearest_name
from megatron_rl.errors import ConfigError

FOLDER = Path(__file__).parent / "gpus"


@dataclass(frozen=True)
class Hardware:
    """One GPU. Bytes, FLOP/s without sparsity, bytes/s; links and network count one direction, per GPU.

    memory_bytes: physical. context_bytes: what CUDA, NCCL and their kernels keep of it, which no allocator sees.
    host_bandwidth: between a GPU and its host's memory. matmul_efficiency: share of the peak that long training
    reaches. expert_share: part of that, and of memory's speed, that experts reach. Both are calibrated
    (scripts/published); all else is data sheet.
    """

    name: str
    memory_bytes: float
    bfloat16_flops: float
    float32_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    matmul_efficiency: float
    context_bytes: float = 2.0e9
    host_bandwidth: float = 25.0e9
    expert_share: float = 1.0

    def flops(self, dtype: str) -> float:
        """Peak of matrix products in a dtype; that of both types of 16 bits is one."""
        return self.float32_flops if dtype == "float32" else self.bfloat16_flops


def known_hardware() -> list[str]:
    """Names of the files that come with the package."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def default_hardware(device: str) -> str:
    """What a plan is made for where nothing else is said. device: trainer.device."""
    return "cpu" if device == "cpu" else "h100"


def load_hardware(name: str) -> Hardware:
    """By name, or from a YAML file of the user's. Raises ConfigError when there is none or it lacks a number."""
    file = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not file.is_file():
        nearest = nearest_name(name, known_hardware())
        raise ConfigError(
            f"hardware {name} must be one of {', '.join(known_hardware())}, or a YAML file; nearest: {nearest}"
        )
    values = yaml.safe_load(file.read_text())
    fields = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(Hardware)}
    del fields["name"]
    wrong = [key for key, value in values.items() if key not in fields or not isinstance(value, int | float)]
    lacking = [key for key, needed in fields.items() if needed and key not in values]
    if wrong or lacking:
        raise ConfigError(
            f"{file} must give numbers for {', '.join(fields)}; it lacks {', '.join(lacking) or 'none'}, and "
            f"{', '.join(wrong) or 'nothing'} in it cannot be used"
        )
    return Hardware(file.stem, **{key: float(value) for key, value in values.items()})
