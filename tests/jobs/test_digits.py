"""The digits of the default job are scikit-learn's, whichever way they are read."""

from __future__ import annotations

import numpy
import pytest
from sklearn.datasets import load_digits

from paragrad.jobs import digits

pytestmark = pytest.mark.pure


def test_file_equals_the_scikit_learn_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = load_digits(return_X_y=True)
    for _ in range(2):
        ours, named = digits._load_digits()
        assert numpy.array_equal(ours, images)
        assert numpy.array_equal(named, labels)
        assert (ours.dtype, named.dtype) == (images.dtype, labels.dtype)
        # then by scikit-learn itself
        monkeypatch.setattr(digits, "find_spec", lambda name: None)
