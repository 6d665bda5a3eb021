"""pgoutput's bytes to Arrow: no connection, no file, no clock."""
