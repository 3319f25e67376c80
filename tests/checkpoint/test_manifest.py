"""A checkpoint's list of contents: there and back, and every way in which a folder does not keep to it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import pytest
from saved import FILES, MODELS, SETTINGS, save, write_files

from megatron_rl.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    FileRecord,
    Manifest,
    ManifestError,
    OtherFormatError,
    broken_files,
    digest_files,
    model_identity,
    read_manifest,
)


def test_a_manifest_comes_back_from_the_disk(tmp_path):
    """Would not catch a field that is lost on the way out and filled with the same default on the way in."""
    folder, manifest = write_files(tmp_path, 7)
    complete = save(tmp_path, 7)
    assert read_manifest(complete) == manifest == Manifest.from_json(manifest.to_json())
    assert (manifest.format, manifest.step, manifest.models) == (FORMAT, 7, MODELS)
    assert not folder.exists()


def test_records_are_those_of_the_files(tmp_path):
    """Against hashlib by hand, an empty file too. Would not catch a file that is not on the disk yet."""
    contents = {"a": b"", "b": b"x" * 3_000_000, "c": b"abc"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert digest_files(tmp_path, contents) == {
        name: FileRecord(len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()
    }


def test_broken_files_are_named_with_the_reason(tmp_path):
    """Missing, cut, flipped, in what is no folder. Would not catch a file that nobody listed."""
    folder = save(tmp_path, 3)
    manifest = read_manifest(folder)
    assert broken_files(folder, manifest, checksums=True) == []
    missing, cut, flipped, *_ = FILES
    (folder / missing).unlink()
    content = (folder / flipped).read_bytes()
    (folder / flipped).write_bytes(bytes([content[0] ^ 1]) + content[1:])
    os.truncate(folder / cut, 5)
    expected = [f"{missing} is missing", f"{cut} has 5 bytes, not {manifest.files[cut].size}"]
    assert broken_files(folder, manifest, checksums=False) == expected
    expected.append(f"{flipped} has other content than was written")
    assert broken_files(folder, manifest, checksums=True) == expected
    shutil.rmtree(folder / "actor")
    (folder / "actor").touch()
    found = broken_files(folder, manifest, checksums=False)
    inside = [name for name in manifest.files if name.startswith("actor/")]
    assert [line.partition(" cannot be read: ")[0] for line in found] == inside


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        (None, ManifestError, "no manifest.json: torn, or not written by megatron_rl"),
        ("", ManifestError, "not JSON"),
        ("[" * 100_000, ManifestError, "not JSON"),
        ('{"project": "megatron_rl", "form', ManifestError, "not JSON"),
        ("[1]", OtherFormatError, "another project (None, not 'megatron_rl')"),
        ({"project": "other"}, OtherFormatError, "another project ('other', not 'megatron_rl')"),
        ({"format": 9}, OtherFormatError, f"has format 9; this version reads {FORMAT}"),
        ({"format": 0}, OtherFormatError, f"has format 0; this version reads {FORMAT}"),
        ({"files": None}, ManifestError, "damaged"),
        ({"files": {"a": {"size": 1}}}, ManifestError, "damaged"),
        ({"step": "last"}, ManifestError, "damaged"),
        ({"step": float("inf")}, ManifestError, "damaged"),
        ({"models": {"actor": 3}}, ManifestError, "damaged"),
        ({"files": {"../x": {"size": 1, "sha256": ""}}}, ManifestError, "outside of its folder: ../x"),
        ({"files": {"/etc/x": {"size": 1, "sha256": ""}}}, ManifestError, "outside of its folder: /etc/x"),
    ],
)
def test_a_manifest_that_cannot_be_used(tmp_path, text, kind, reason):
    """The reason is the message. Would not catch a lie that is well formed."""
    if isinstance(text, dict):
        text = json.dumps({"project": "megatron_rl", "format": FORMAT, "step": 1, "models": {}, "files": {}} | text)
    if text is not None:
        (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ManifestError) as raised:
        read_manifest(tmp_path)
    assert type(raised.value) is kind and reason in str(raised.value)


def test_what_is_left_out_of_a_config_is_resolved():
    """Implied and written out are the same model. Would not catch a setting that should count and is not listed."""
    implied = {name: value for name, value in SETTINGS.items() if name != "num_key_value_heads"}
    written = implied | {"num_key_value_heads": 12, "head_dim": 8, "tie_word_embeddings": False, "num_experts": None}
    assert model_identity(implied) == model_identity(written)
    assert model_identity(implied) != model_identity(written | {"head_dim": 16})
    experts = {"num_experts": 8, "moe_intermediate_size": 20}
    renamed = {"num_local_experts": 8, "moe_intermediate_size": 20}
    assert model_identity(implied | experts) == model_identity(implied | renamed) != model_identity(implied)
    assert model_identity(implied | experts) != model_identity(implied | experts | {"moe_intermediate_size": 24})
    assert model_identity(implied | {"moe_intermediate_size": 20}) == model_identity(implied)
    assert model_identity({"num_attention_heads": 12})["head_dim"] is None
