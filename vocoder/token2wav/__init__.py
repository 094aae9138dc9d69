"""The decoder of Qwen2.5-Omni: codes to mel by flow matching, mel to PCM by BigVGAN."""
