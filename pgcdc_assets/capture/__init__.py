"""From the source to the raw zone: snapshots, windows of changes, epochs."""
