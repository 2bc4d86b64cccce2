"""The refit protocol without I/O: messages in, messages and effects out."""

from rl_core.refit.session.base import (
    Attach,
    Effect,
    End,
    Install,
    Load,
    MakePlan,
    Pack,
    Phase,
    Publish,
    Send,
    Session,
    bucket_digest,
    seal_digest,
)
from rl_core.refit.session.receiver import VERIFY_LEVELS, ReceiverSession
from rl_core.refit.session.sender import SenderSession

__all__ = [
    "VERIFY_LEVELS",
    "Attach",
    "Effect",
    "End",
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
    "bucket_digest",
    "seal_digest",
]
