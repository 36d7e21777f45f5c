"""Who does what in a run of several ranks. Computed before any process starts."""
