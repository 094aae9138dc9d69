"""Audio containers and codecs: float32 PCM in, one container's bytes out as they are made."""
