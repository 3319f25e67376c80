"""Prompt files and example files, checked and tokenised once."""
