"""The fuzzer finds faults: each is put into a copy of the kernels, and a drawn case shows it.

A case counts where the copy is wrong and the kernels as they are right. `make test` runs one seed for every second
fault, the marker `extended` (make test-extended) three for each.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from params import few
from planting import DEFECTS, Defect, Planter, plant

CASES = 3000
SEEDS = (11, 22, 33)

pytestmark = pytest.mark.interpreted


@pytest.fixture(scope="module")
def planter() -> Iterator[Planter]:
    running = Planter()
    yield running
    running.close()


def found(planter: Planter, defect: Defect, tmp_path, seed: int) -> int:
    """How many cases were drawn until one showed the fault."""
    from fused_softmax.lab.fuzz.draw import Case
    from fused_softmax.lab.fuzz.judge import evaluate

    for wrong in planter.run(defect, plant(defect, tmp_path), seed, CASES):
        if not evaluate(Case.from_json(wrong["case"]), "cpu").found():
            return wrong["index"]
    pytest.fail(f"{defect.name}: no case of {CASES} with seed {seed} shows it")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("defect", few(DEFECTS[::2], DEFECTS), ids=lambda d: d.name.replace(" ", "_"))
@pytest.mark.parametrize("seed", [SEEDS[0], *(pytest.param(s, marks=pytest.mark.extended) for s in SEEDS[1:])])
def test_the_fuzzer_finds(planter, defect, seed, tmp_path):
    print(f"{defect.name}: seen at case {found(planter, defect, tmp_path, seed)}")


def test_a_fault_whose_place_is_gone_is_no_fault(tmp_path):
    gone = Defect("gone", "common/tiles.py", "text that no kernel has", "", "softmax")
    with pytest.raises(LookupError, match="0 times"):
        plant(gone, tmp_path)
