"""How Spark is started, configured and spoken to."""
