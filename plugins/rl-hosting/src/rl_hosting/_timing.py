"""How long rl-hosting waits for what, in seconds, and which of these depend on each other.

What a backend may set is an attribute of its class (:class:`rl_hosting.HostedGeneration`).
"""

from __future__ import annotations

__all__ = [
    "CLOSE_S",
    "COLLECT_S",
    "DRIVER_SEND_S",
    "ENGINE_SEND_S",
    "EXIT_STATUS_S",
    "FRAME_STALL_S",
    "HEARTBEAT_S",
    "KILLED_S",
    "KILL_S",
    "LATE_CLOSE_S",
    "MEMORY_POLL_S",
    "PARENT_ACTS_S",
    "PARENT_POLL_S",
    "POLL_S",
    "REFIT_BUSY_POLL_S",
    "REFIT_POLL_S",
    "REFIT_REPORT_S",
    "SERVER_CLOSE_S",
    "SHOW_LOG_S",
    "SOCKET_SETTLE_S",
    "YOUNG_S",
]

# -- a driver waits for its engine's process ---------------------------------------------------

#: Between two looks at whether the process is alive, while a reply is awaited.
POLL_S = 0.2
#: How long a service of rows waits for the engine before it looks at new calls.
COLLECT_S = 0.2
#: Between two signs of life of an engine that decodes; ``silence_s`` must be many of these.
HEARTBEAT_S = 1.0
#: For the rest of a frame, once it has begun: its sender does nothing else meanwhile.
FRAME_STALL_S = 20.0
#: For the engine's process to take a frame: a separate thread reads there, also while it decodes.
DRIVER_SEND_S = 60.0
#: For the driver to take a frame. Longer, because a driver may be stopped, as in a debugger.
ENGINE_SEND_S = 10 * DRIVER_SEND_S

# -- an engine's process ends ------------------------------------------------------------------

#: For an engine to end by itself when its socket is closed.
CLOSE_S = 20.0
#: The same for one that owes a reply: it hangs.
LATE_CLOSE_S = 1.0
#: For the exit status of a process that closed its socket.
EXIT_STATUS_S = 2.0
#: For killed processes to end; one that is in the kernel must leave it first.
KILL_S = 2.0
#: For the fork server to end a killed engine's session.
KILLED_S = 2 * KILL_S
#: For a fork server to end, and for it to take a request.
SERVER_CLOSE_S = 3.0

# -- a driver or a fork server died ------------------------------------------------------------

#: Between two looks of a process at whether its parent and its driver are alive.
PARENT_POLL_S = 0.5
#: For the fork server to end an engine after its driver died, before the engine does so itself. The
#: server looks as often, so that this is several looks.
PARENT_ACTS_S = 4 * PARENT_POLL_S
#: Between the end of a driver's last socket and the end of its process, as the kernel orders them.
SOCKET_SETTLE_S = 0.05
#: Between two looks for the process that made something in /dev/shm, which the kernel reports just
#: before that process has it.
MEMORY_POLL_S = 0.02

#: Age of a directory from which it is looked at whether anybody uses it.
YOUNG_S = 60.0

# -- refits ------------------------------------------------------------------------------------

#: How long an idle engine waits for news of a refit before it answers, so that other calls are
#: taken in between.
REFIT_POLL_S = 0.25
#: Between two questions to an engine that decodes: it does not decode while it answers.
REFIT_BUSY_POLL_S = 0.02
#: Beyond a refit's deadline, for the workers to report that they kept it.
REFIT_REPORT_S = 3.0

#: Between two looks at whether an engine printed something that is to be shown.
SHOW_LOG_S = 0.1
