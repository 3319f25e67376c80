"""From prompts to responses: the sampler, the scheduler of slices, its journal, replay and simulation."""
