"""Folding raw changes into the rows of an SCD table: DataFrame in, DataFrame out."""
