"""Score answers: reward functions and their processes, reward models, shaping."""
