"""What answers are worth: reward functions and their processes, reward models, shaping."""
