"""Adapters to tools that people already use; each needs an extra of its own and is imported by name."""
