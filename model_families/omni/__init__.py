"""What the omni families share: configuration, prompt layout and positions."""
