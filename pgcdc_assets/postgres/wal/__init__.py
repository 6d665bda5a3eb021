"""WAL: positions, timelines, and the records themselves."""
