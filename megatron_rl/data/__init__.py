"""What training reads: prompt files and example files, checked and tokenised once."""
