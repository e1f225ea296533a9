"""One process, one model: the replica actor, its engine thread and its messages."""
