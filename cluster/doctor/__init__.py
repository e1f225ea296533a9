"""What is wrong with a machine, and what to do about it: facts, pure checks of them, findings."""
