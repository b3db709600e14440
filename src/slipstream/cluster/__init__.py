"""Ranks of a job: read from the environment, joined in process groups, started by the launcher."""
