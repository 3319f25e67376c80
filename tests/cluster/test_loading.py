"""Imports without garbage collections, and without empty folders that torch leaves in the temporary folder."""

from __future__ import annotations

import gc
import os
import tempfile

import pytest

from megatron_rl.cluster.loading import COMPILED, folder_of_ranks, leaving_none_empty, without_collections


def test_collects_again_afterwards() -> None:
    """Also after an error; what was there is not looked at again. Would not catch collections of other threads."""
    before = gc.get_freeze_count()
    try:
        with pytest.raises(KeyError), without_collections():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("is_given", [False, True])
def test_an_empty_folder_goes_and_others_stay(tmp_path, monkeypatch, is_given):
    """As torch makes it in this process and in ranks; one with something in it, and one that the user has named, stay.

    Would not catch another folder that a newer torch makes.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(COMPILED, raising=False)
    own = tmp_path / "torchinductor_someone"
    if is_given:
        monkeypatch.setenv(COMPILED, str(own))
    with leaving_none_empty():
        os.environ[COMPILED] = str(own)
        own.mkdir()
        os.mkdir(folder_of_ranks())
    monkeypatch.delenv(COMPILED)
    assert own.exists() is is_given and os.path.exists(folder_of_ranks()) is is_given
    with leaving_none_empty():
        os.makedirs(folder_of_ranks(), exist_ok=True)
        os.mkdir(f"{folder_of_ranks()}/kernels")
    assert os.path.exists(folder_of_ranks())
