"""From prompts to answers: the sampler, the scheduler of slices, its journal, replay and simulation."""
