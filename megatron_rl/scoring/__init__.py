"""Score responses: reward functions and their processes, reward models, shaping."""
