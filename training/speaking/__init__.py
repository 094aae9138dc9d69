"""How the default model learned to speak: its codec, its talker, and how both are judged."""
