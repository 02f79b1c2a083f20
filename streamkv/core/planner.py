"""Planner: puts a step together, or says that there is none to be had.

Owns the order in which a step is filled, and what is done when those who run wait for others, who
wait for them. Must not know steps in flight but that there are some. Invariant (I5): with work to
do, and nothing on its way that changes anything, there is a step.
"""

from __future__ import annotations

from .admission import Admission
from .committer import Committer
from .grammar import Grammars
from .kv.manager import KVManager
from .kv.types import Copy
from .prompts import Prompts
from .roster import Roster
from .service import Service
from .step_plan import StepPlan


class Planner:
    """Running sequences first, then those that wait, then copies."""

    __slots__ = ("_admission", "_committer", "_grammars", "_kv", "_prompts", "_roster", "_service")

    def __init__(
        self,
        kv: KVManager,
        roster: Roster,
        service: Service,
        admission: Admission,
        prompts: Prompts,
        grammars: Grammars,
        committer: Committer,
    ) -> None:
        self._kv = kv
        self._roster = roster
        self._service = service
        self._admission = admission
        self._prompts = prompts
        self._grammars = grammars
        self._committer = committer

    def plan(self, step_id: int, budget: int, *, is_step_in_flight: bool) -> StepPlan | None:
        """The next step, or None if nothing can be done now."""
        roster, kv, on_their_way = self._roster, self._kv, self._committer.copies_on_their_way
        while True:
            if roster.loading:
                self._end_loads()
            plan = StepPlan(step_id, budget)
            self._prompts.begin_step(roster.waiting)
            all_served = self._service.serve_running(plan)
            if all_served and not plan.preempted:
                self._admission.admit_waiting(plan, is_step_in_flight)
            copies = kv.take_copies()
            is_idle = not (copies or plan.scheduled)
            if is_idle and not is_step_in_flight and roster.running and self._is_stalled:
                copies = self._unstall(plan)
            if copies:
                on_their_way.update(copy.number for copy in copies)
            # A step of nothing brings news of copies.
            if copies or plan.scheduled or (on_their_way and not is_step_in_flight):
                break
            if not kv.begin_reads():
                return None
        plan.copies = copies
        if self._prompts.watched:
            self._prompts.note(plan)
        return plan

    @property
    def _is_stalled(self) -> bool:
        """Nothing will come back by itself: those who run wait for others of their groups, and
        these, in the queue or loading, for the blocks of those who run."""
        return not (self._kv.is_busy or self._grammars.is_busy)

    def _unstall(self, plan: StepPlan) -> list[Copy]:
        """Somebody fits after all, with what is cached by now; or the last group steps back."""
        roster, admission, kv = self._roster, self._admission, self._kv
        for steps_back in (False, True):
            if steps_back:
                self._service.preempt(roster.running[-1].group, plan)
            admission.forget_refusal()
            if not roster.loading:  # who loads comes first
                admission.admit_waiting(plan, False)
            copies = kv.take_copies()
            if copies or plan.scheduled:
                break
        return copies

    def _end_loads(self) -> None:
        for sequence in self._kv.take_loaded():
            self._roster.end_load(sequence)
            self._admission.forget_refusal()
