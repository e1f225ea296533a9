"""The final files of a job in the format that was asked for, and reading them back."""
