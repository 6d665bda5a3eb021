"""Mutation testing: mutmut writes the mutants, and warm test processes test them in turn.

mutmut's own runner starts a pytest session for each mutant, and with it a Postgres server and a
Spark session. Here one session tests many mutants: the code object of a function is replaced in
place, so servers, sessions and imports are kept. `make mutation` runs this package.
"""
