"""SCD tables as Delta tables: their state, their log, their maintenance."""
