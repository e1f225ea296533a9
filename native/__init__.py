"""The engine: one looped language model per process. Knows nothing of Ray or of files of requests."""
