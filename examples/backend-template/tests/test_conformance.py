"""DeepInfer's conformance kit as tests: one for each op and level, one for each other case."""

from deepinfer.testing import conformance_tests  # noqa: F401
