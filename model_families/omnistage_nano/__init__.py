"""The default model's family: parts of the omni families, put together small."""
