"""Keeps `tests/` out of `sys.path`.

pytest adds the folder of a test file, or of a conftest, to `sys.path`. It skips folders that are
packages, as this one is. Without this file, `import datasets` finds `tests/datasets`, and
transformers takes it for the library of that name.
"""
