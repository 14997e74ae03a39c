"""The answer of each lesson's puzzle, one file a lesson with the lesson's name.

A file stands alone: the reader gets it with its core left out (fused_softmax.lab.grading.puzzle). The core lies between
a comment `# write: ...`, which is the hint that stays, and a comment `# end`.
"""
