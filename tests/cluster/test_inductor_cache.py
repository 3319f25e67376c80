"""What torch leaves in the temporary folder on import: nothing stays of it that is empty."""

from __future__ import annotations

import os
import tempfile

import pytest

from megatron_rl.cluster.inductor_cache import VARIABLE, folder_of_ranks, leaving_none_empty


@pytest.mark.parametrize("is_given", [False, True])
def test_an_empty_folder_goes_and_others_stay(tmp_path, monkeypatch, is_given):
    """As torch makes it in this process and in ranks; one with something in it, and one that the user has named, stay.

    Would not catch another folder that a newer torch makes.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    own = tmp_path / "torchinductor_someone"
    if is_given:
        monkeypatch.setenv(VARIABLE, str(own))
    with leaving_none_empty():
        os.environ[VARIABLE] = str(own)
        own.mkdir()
        os.mkdir(folder_of_ranks())
    monkeypatch.delenv(VARIABLE)
    assert own.exists() is is_given and os.path.exists(folder_of_ranks()) is is_given
    with leaving_none_empty():
        os.makedirs(folder_of_ranks(), exist_ok=True)
        os.mkdir(f"{folder_of_ranks()}/kernels")
    assert os.path.exists(folder_of_ranks())
