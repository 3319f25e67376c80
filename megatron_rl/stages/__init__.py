"""The stages before PPO: supervised fine-tuning, reward models and preferences, one straight loop each."""
