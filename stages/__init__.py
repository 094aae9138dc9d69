"""The graph: deployment, coordinator, stage shells, workers, and the service the API talks to."""
