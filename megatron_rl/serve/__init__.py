"""Training as a service: clients of the Tinker API train and sample step by step, over the roles of a run."""
