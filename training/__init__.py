"""How the default model's own weights were trained. Nothing that serves imports this."""
