"""How every HTTP benchmark talks to a server: connections, SSE, chat streams, and what the server is."""
