"""The levels of the conformance kit, one module each."""
