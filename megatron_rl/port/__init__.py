"""From a verl script to a configuration of this program: run the script without its trainer, translate, write."""
