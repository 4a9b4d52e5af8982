"""A byte-level GPT trained on the source of Python's standard library: ``python -m examples.gpt --help``."""
