"""Old defects, put back one by one into servers that are right without: each must be seen."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from sglang_indexcache.errors import ServerError
from tests.rehearsal.conftest import Models, Rehearse
from tests.rehearsal.questions import (
    alone_and_together,
    behind_another_pattern_and_first,
)
from tests.rehearsal.stage.mutants import MUTANTS
from tests.rehearsal.test_matrix_server import CASES, serve_case

pytestmark = pytest.mark.matrix
OTHER_ANSWERS = "other answers"


@dataclass(frozen=True)
class Caught:
    """The server of the matrix that catches a defect, and what is seen there.

    Attributes:
        case: the server's name.
        symptom: :data:`OTHER_ANSWERS`, or what stands in the log of a server that ended.
    """

    case: str
    symptom: str


CAUGHT = {
    "adopts_only_once": Caught("pipeline parallelism", "the buffer holds those of position"),
    "takes_a_slice_for_a_selection": Caught("attention tensor parallelism", "selected for"),
    "leaves_the_drafts_backend_unnamed": Caught("MTP", "EAGLE is not supported in decode"),
    "verifies_by_the_next_requests_pages": Caught("MTP by kernels of ours", OTHER_ANSWERS),
    "shares_the_cache_between_patterns": Caught("attention tensor parallelism", OTHER_ANSWERS),
    "scores_from_a_row_too_early": Caught("row split", "entries behind the length of a list"),
    "drops_a_part": Caught("row split", OTHER_ANSWERS),
    "joins_parts_in_another_order": Caught("row split", "entries behind the length of a list"),
    "does_not_shift_keys": Caught("row split", "Connection closed by peer"),  # the other rank ended
    "hands_a_half_the_first_rows": Caught("two-batch overlap", OTHER_ANSWERS),
    "gives_a_half_the_first_patterns": Caught("two-batch overlap", OTHER_ANSWERS),
    "gives_attention_the_padding": Caught("attention tensor parallelism", "> num_tokens ("),
    "takes_a_selection_for_all_rows": Caught("attention tensor parallelism", OTHER_ANSWERS),
    "reads_where_nothing_was_selected": Caught("attention tensor parallelism", "but the buffer"),
}


def test_each_defect_is_caught_somewhere() -> None:
    assert CAUGHT.keys() == MUTANTS.keys()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_an_old_defect_is_seen(mutant: str, rehearse: Rehearse, models: Models) -> None:
    """A broken server does not answer what the matrix asks of it unbroken."""
    caught = CAUGHT[mutant]
    case = next(case for case in CASES if case.name == caught.case)
    try:
        with serve_case(case, rehearse, models, mutant) as client:
            answers = [alone_and_together(client, case.asked)]
            if case.is_live:
                answers.append(behind_another_pattern_and_first(client))
            symptom = (
                OTHER_ANSWERS if any(first != second for first, second in answers) else "nothing"
            )
    except ServerError as error:
        symptom = "\n".join((str(error), *error.__notes__))
    assert caught.symptom in symptom
