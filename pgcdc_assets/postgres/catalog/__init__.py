"""What the catalog of the source says about publications, tables and types."""
