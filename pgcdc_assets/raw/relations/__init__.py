"""The tables of the source as the raw zone knows them: definitions, versions and changes."""
