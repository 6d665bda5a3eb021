"""The pre-flight: everything that a capture needs of a server."""
