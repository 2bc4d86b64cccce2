"""How xdist deals the checks out, so that one that takes its process along stops nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdist.scheduler import LoadGroupScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

__all__ = ["SuiteScheduling"]


class SuiteScheduling(LoadGroupScheduling):  # type: ignore[misc]  # xdist has no types
    """Groups stay together; a check is not run again in the process that replaces a dead one."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Deals out again what an ended process had left, but for what ended it.

        Args:
            node: The process.

        Returns:
            The check that was running, if any.
        """
        workload = self.assigned_work.pop(node)
        left: list[tuple[dict[str, bool], str]] = [
            (unit, test) for unit in workload.values() for test in unit if not unit[test]
        ]
        if not left:
            return None
        unit, running = left[0]
        unit[running] = True
        self.workqueue.update({k: unit for k, unit in workload.items() if not all(unit.values())})
        for other in self.nodes:
            self._reschedule(other)
        return running

    def schedule(self) -> None:
        """Gives every process work, a new one two pieces: the first of one begins with the next."""
        joined = self.collection is not None
        super().schedule()
        if joined:
            for node in self.nodes:
                self._reschedule(node)
