"""Changes to torch, for processes that rehearse a rank on a GPU that is not there."""
