"""Performs a flip's work on real memory: asks one by one, answers by what came of them. It has no order of its own.

An ask of this rank alone that raises has failed, with a reason: what it may have touched is had back by asks that
check. One that waits for other ranks and raises leaves them where nobody can say, and so does an error here.
"""

from services.core.flip.work import Outcome, Program
from services.core.flip.work_asks import GROUP_ASKS, Ask
from services.core.flip.work_table import WELL, Answer, Verdict
from services.worker.memory.flip_plan import NotDoneError, Performs


def carry_out(program: Program, performs: Performs, name: str) -> Outcome:
    """Runs a program to its end; `name`: of this rank, for reasons."""
    try:
        ask = next(program)
        while True:
            ask = program.send(answer_to(ask, performs, name))
    except StopIteration as ended:
        outcome: Outcome = ended.value
        return outcome


def answer_to(ask: Ask, performs: Performs, name: str) -> Answer:
    """What came of one ask."""
    try:
        return performs[type(ask)](ask) or WELL
    except Exception as error:  # it is the program's to judge
        what = str(error) if isinstance(error, NotDoneError) else f"{type(error).__name__}: {error}"
        verdict = Verdict.UNKNOWN if isinstance(ask, GROUP_ASKS) else Verdict.FAILED_HERE
        return Answer(verdict, f"{name}: {what}")
