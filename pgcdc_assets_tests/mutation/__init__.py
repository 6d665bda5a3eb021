"""Mutation testing: mutmut writes the mutants, and warm test processes try them one by one.

mutmut's own runner begins a pytest session for each mutant, which would start a Postgres server and
a Spark session each time. Here one session tries many mutants: a function's code object is
exchanged in place, so servers, sessions and imports stay. `make mutation` runs it.
"""
