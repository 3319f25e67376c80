"""Weights in from and out to Hugging Face folders."""
