"""Small checkpoints for tests: the folders and manifests of real ones, with a few bytes in each file."""

from __future__ import annotations

import pickle
from pathlib import Path

from megatron_rl.checkpoint.contents import write_role_file
from megatron_rl.checkpoint.folders import commit, unfinished_folder
from megatron_rl.checkpoint.manifest import FORMAT, Manifest, digest_files, model_identity

SETTINGS = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 12,
    "num_hidden_layers": 6,
    "num_key_value_heads": 6,
    "vocab_size": 100,
}
MODELS = {"actor": model_identity(SETTINGS), "critic": model_identity(SETTINGS)}
FILES = (
    *("actor/__0_0.distcp", "actor/__1_0.distcp", "critic/__0_0.distcp", "run.json"),
    *(f"{role}/{name}" for role in ("actor", "critic") for name in ("role.json", ".metadata")),
)


def write_files(root: Path, step: int, text: str = "") -> tuple[Path, Manifest]:
    """A folder that is still to be committed, and its manifest; `text` makes its content differ."""
    folder = unfinished_folder(root, step)
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} of step {step} {text}")
    for role in MODELS:
        write_role_file(folder, role, step)
        (folder / role / ".metadata").write_bytes(pickle.dumps({"text": text}))
    return folder, Manifest(FORMAT, step, MODELS, digest_files(folder, FILES))


def save(root: Path, step: int, text: str = "") -> Path:
    """A complete checkpoint."""
    return commit(*write_files(root, step, text))
