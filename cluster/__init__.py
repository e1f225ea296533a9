"""Many processes: placement, router, pool, batch jobs and the command line."""
