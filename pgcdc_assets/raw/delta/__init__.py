"""Delta tables of the raw zone: data files, log entries, commits and maintenance."""
