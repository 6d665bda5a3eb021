"""The pre-flight check of a server, a publication, a slot and tables."""
