"""Changes to torch, for processes that rehearse a rank on a GPU that does not exist."""
