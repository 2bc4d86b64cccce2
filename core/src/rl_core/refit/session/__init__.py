"""The refit protocol without I/O: messages in, messages and effects out."""

from rl_core.refit.session.base import (
    Attach,
    Confirm,
    Effect,
    Install,
    Load,
    MakePlan,
    Pack,
    Phase,
    Publish,
    Send,
    Session,
)
from rl_core.refit.session.receiver import ISOLATION_LEVELS, VERIFY_LEVELS, ReceiverSession
from rl_core.refit.session.sender import SenderSession

__all__ = [
    "ISOLATION_LEVELS",
    "VERIFY_LEVELS",
    "Attach",
    "Confirm",
    "Effect",
    "Install",
    "Load",
    "MakePlan",
    "Pack",
    "Phase",
    "Publish",
    "ReceiverSession",
    "Send",
    "SenderSession",
    "Session",
]
