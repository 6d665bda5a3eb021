"""CDC behaviours, one file per theme; the numbers are those of the project's list."""
