"""Trains the default model's vision tower through its frozen language model, on pictures drawn by program."""
