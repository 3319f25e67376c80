"""Tasks other than PPO: supervised fine-tuning, reward models and preferences, one straight loop each."""
