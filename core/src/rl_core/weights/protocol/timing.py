"""How long refits wait, and how these times depend on each other.

A user chooses ``deadline_s`` alone. The times here decide how soon the loss of a peer is noticed,
and in which order those who wait report that the deadline has passed. Times that depend on no other
one are constants of the module that waits.
"""

# -- how soon the loss of a peer is noticed --------------------------------------------------------

#: Between two looks at deadlines and at whether the peers are there, in every loop that waits.
TICK_S = 0.05
#: Between two signs of life on every connection.
HEARTBEAT_S = 0.5
#: Without a sign of life for so long, a peer counts as lost: a busy host is late with some of them.
SILENCE_S = 6 * HEARTBEAT_S
#: For so long a process may still seem to run after its connection has ended: the kernel
#: closes what a process had open before it removes the process.
EXIT_VISIBLE_S = 1.0
#: After a failure, to find out whether another rank's end was the cause, which is noticed sooner.
CAUSE_S = 0.5

# -- how the two sides meet ------------------------------------------------------------------------

#: Between two Hellos of a receiver, or two refusals where it cannot take part.
HELLO_S = 0.5
#: A refusal is repeated for so long, because the sender may be about to look for one.
REFUSAL_S = 6 * HELLO_S

# -- who reports first that the deadline has passed ------------------------------------------------

#: Before the deadline: a side that is held up, or knows who is late, reports it to the others. At
#: most a tenth of the refit's seconds.
TELL_S = 1.0
#: After it: a rank that follows names rank 0, which had its time to name another.
FOLLOWER_GRACE_S = 2.0
#: After it: the driver reports that neither side did.
DRIVER_GRACE_S = 5.0

#: Who did not look at its messages for so long was busy itself, and blames nobody else.
BUSY_S = 0.5

# -- the end ---------------------------------------------------------------------------------------

#: The last messages are still delivered after a connection is closed.
LINGER_S = 0.2
#: For refits to end when their process does.
EXIT_GRACE_S = 1.0


def report_margin_s(deadline_s: float) -> float:
    """How long before a deadline of so many seconds a side reports who is late."""
    return min(TELL_S, deadline_s / 10)
