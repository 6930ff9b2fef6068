"""Claims of the docs: each feature called rehearsed is one that a rehearsed server has."""

from __future__ import annotations

from sglang_indexcache.serving.operating.features import FEATURES, REHEARSED
from tests.rehearsal.test_matrix_server import CASES, IN_TEST_SERVER


def test_every_feature_that_is_called_rehearsed_has_a_server() -> None:
    claimed = {feature.name for feature in FEATURES if REHEARSED in feature.known_by}
    assert claimed == {name for case in CASES for name in case.rehearses} | IN_TEST_SERVER
