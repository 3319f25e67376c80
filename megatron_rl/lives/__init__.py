"""A training run seen from outside: one process in a session of its own, how it ends, what it wrote."""
