"""From samples to training batches: assembling experience, mini-batches, micro-batches."""
