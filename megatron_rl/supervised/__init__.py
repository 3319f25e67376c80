"""What supervised fine-tuning, reward models and preference losses read: files, as tokens with what counts in them."""
