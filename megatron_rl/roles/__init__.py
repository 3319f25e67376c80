"""The SPMD side of each role: what one rank does when the controller calls."""
