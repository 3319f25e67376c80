"""Imports without garbage collections."""

from __future__ import annotations

import gc

import pytest

from megatron_rl.cluster.loading import without_collections


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
