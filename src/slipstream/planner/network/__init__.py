"""Costs of exchanges on a cluster: measured, fitted, scaled to other clusters. Reads no trace."""
