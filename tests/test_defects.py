from tests.defects import DEFECTS


def test_each_planted_defect_still_fits_the_source_it_changes() -> None:
    assert [problem for defect in DEFECTS if (problem := defect.problem())] == []
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 50
