"""What the numbers do: the order of operations on real weights, and the two backends that run it."""
