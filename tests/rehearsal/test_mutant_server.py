"""Old defects, put back one by one into servers that are right without: each must be seen."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from sglang_indexcache.errors import ServerError
from tests.rehearsal.conftest import Rehearse
from tests.rehearsal.questions import (
    QUARTER,
    alone_and_together,
)
from tests.rehearsal.stage.mutants import MUTANTS
from tests.rehearsal.test_matrix_server import CASES

pytestmark = pytest.mark.matrix
OTHER_ANSWERS = "other answers"


@dataclass(frozen=True)
class Caught:
    """By which server of the matrix a defect is caught, and what is seen there.

    Attributes:
        case: the server's name.
        symptom: :data:`OTHER_ANSWERS`, or what stands in the log of a server that ended.
    """

    case: str
    symptom: str


CAUGHT = {
    "adopts_only_once": Caught("pipeline parallelism", "the buffer holds those of position"),
    "leaves_the_drafts_backend_unnamed": Caught("MTP", "EAGLE is not supported in decode"),
    "writes_masks_that_no_graph_reads": Caught("graphs of patterns", OTHER_ANSWERS),
}


def test_each_defect_is_caught_somewhere() -> None:
    assert CAUGHT.keys() == MUTANTS.keys()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_an_old_defect_is_seen(mutant: str, rehearse: Rehearse) -> None:
    """What the matrix asks of this server unbroken, it does not answer broken."""
    caught = CAUGHT[mutant]
    case = next(case for case in CASES if case.name == caught.case)
    given = ("--indexcache-pattern", QUARTER, *case.flags)
    try:
        with rehearse(*given, cards=case.cards, family=case.family, mutant=mutant) as client:
            alone, together = alone_and_together(client, case.asked)
            seen = "nothing" if alone == together else OTHER_ANSWERS
    except ServerError as error:
        seen = "\n".join((str(error), *error.__notes__))
    assert caught.symptom in seen
