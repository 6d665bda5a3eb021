"""Start, configuration and use of Spark: embedded sessions and Spark Connect servers."""
