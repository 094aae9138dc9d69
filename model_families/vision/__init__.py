"""What the Qwen-VL families share: packing, patches, attention, layers, M-RoPE positions."""
