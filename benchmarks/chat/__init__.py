"""`omnistage bench chat`: sessions of several turns about images against any OpenAI-compatible server."""
