"""What trains the default model's own weights on a machine that fetches nothing: gathered, set up, run."""
