"""What CUDA kernels allocate beyond, and in another order than, the trace shows.

A trace at the dispatcher sees an operator's results. The C++ behind it also takes
workspaces and temporaries, and it decides which result is allocated first. Rules say so,
as data: a :class:`~fxmem.kernels.steps.Rule` maps an operator call to the sequence of its
allocations. :func:`expand` rewrites a tape by them. No torch: rules work on shapes.
"""

from fxmem.kernels.conv_workspace import tape_questions
from fxmem.kernels.expand import expand
from fxmem.kernels.steps import Drop, Out, Rule, Step, Take, Target

__all__ = ["Drop", "Out", "Rule", "Step", "Take", "Target", "expand", "tape_questions"]
