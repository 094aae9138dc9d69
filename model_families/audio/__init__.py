"""What the audio towers of the omni families share."""
