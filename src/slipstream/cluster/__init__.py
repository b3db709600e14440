"""Who and where I am: ranks from the environment, hosts, process groups, and the launcher."""
