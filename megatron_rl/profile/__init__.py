"""What the clock needs to know of a machine, measured on it: kernels, collectives, passes, an engine, a short run."""
