"""`fused-softmax lesson N --puzzle` and `--try FILE`: a lesson's kernel with its core left out, and its grade.

puzzle(n) is the text of the puzzle. grade(n, file) runs the file in processes of its own, with a limit of time: first
interpreted on the CPU, where every access to memory is watched, then on the GPU where there is one.
"""

from fused_softmax.lab.grading.grade import Grade, grade
from fused_softmax.lab.grading.puzzle import answer, has_puzzle, puzzle

__all__ = ["Grade", "answer", "grade", "has_puzzle", "puzzle"]
