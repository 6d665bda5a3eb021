"""Everything that talks to the source database."""
