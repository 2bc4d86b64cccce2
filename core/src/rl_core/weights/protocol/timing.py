"""How long refits wait, and how these times depend on each other.

A user chooses ``deadline_s`` alone. The times here decide how soon a peer that is gone is noticed,
and in which order those who wait say that the deadline has passed. Times that depend on no other
one are constants of the module that waits.
"""

# -- how soon one that is gone is noticed ----------------------------------------------------------

#: Between two looks at deadlines and at whether the peers are there, in every loop that waits.
TICK_S = 0.05
#: Between two signs of life on every connection.
HEARTBEAT_S = 0.5
#: Without a sign of life for so long, a peer counts as gone: a busy host is late with some of them.
SILENCE_S = 6 * HEARTBEAT_S
#: For so long a process may still seem to run after a connection of its own has ended: the kernel
#: closes what it had open before it is gone.
EXIT_VISIBLE_S = 1.0
#: After a failure, to find out whether another rank's end was the cause, which is noticed sooner.
CAUSE_S = 0.5

# -- how the two sides meet ------------------------------------------------------------------------

#: Between two times that a receiver says Hello, and a refusal where it cannot.
HELLO_S = 0.5
#: A refit that a receiver asks for may still begin here for so long: it has said Hello some times.
UNHEARD_OF_S = 4 * HELLO_S
#: A refusal is said for so long, because the sender may be about to ask.
REFUSAL_S = 6 * HELLO_S

# -- who says first that the deadline has passed ---------------------------------------------------

#: Before the deadline: who is held up, or knows who is late, says so while the others listen. At
#: most a tenth of the refit's seconds.
TELL_S = 1.0
#: After it: a rank that follows says so of rank 0, which had its time to name another.
FOLLOWER_GRACE_S = 2.0
#: After it: the driver says that neither side did.
DRIVER_GRACE_S = 5.0

# -- the end ---------------------------------------------------------------------------------------

#: What was said last is still delivered after a connection is closed.
LINGER_S = 0.2
#: For refits to end when their process does.
EXIT_GRACE_S = 1.0


def report_margin_s(deadline_s: float) -> float:
    """How long before a deadline of so many seconds it is said who is late."""
    return min(TELL_S, deadline_s / 10)
