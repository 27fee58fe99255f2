"""Every exception of the package. A message says what happened, to whom, and what to do; none reaches a user as a
traceback. Expected outcomes (a declined plan, a symmetric NAT) are values, not exceptions.

    KafilaError
    |-- UsageError              the person typed something that cannot be meant
    |   `-- InvitationError     a session code that is mistyped or of another make
    |-- SessionError            the session cannot form or go on
    |   |-- RendezvousUnreachable
    |   |-- UnknownSession      the rendezvous knows no such session
    |   |-- WrongSecret         the code's secret does not open the session
    |   |-- SessionFull
    |   |-- MemberLeft          somebody the ring needs has gone
    |   |-- PlanDeclined        no division fits; carries the planner's words
    |   `-- Unanswered          some of a pipe's questions got no answer; each said why
    |-- ModelError              the checkpoint cannot be served
    |   |-- ModelNotFound
    |   |-- ModelIncomplete     names the tensor and the file
    |   |-- FetchFailed         it does not come from its source, or there is no room for it here
    |   |   `-- SourceSilent    the source does not answer, or breaks off again and again
    |   `-- UnsupportedModel    names the architecture and lists those supported
    |-- TraceError              a file is not a trace, or nothing of one
    |-- DeviceError             the device cannot do the work (missing backend, out of memory)
    `-- ProtocolError           a peer sent what the protocol does not allow; carries who
        `-- SealBroken          a sealed message was altered, replayed or made without the secret
"""

from __future__ import annotations


class KafilaError(Exception):
    """The root: ``str()`` of it is one line fit for a person."""

    exit_code = 1


class TraceError(KafilaError):
    """A file is not a trace, or nothing of one."""


class UsageError(KafilaError):
    """The person typed something that cannot be meant."""


class InvitationError(UsageError):
    """A session code that is mistyped or of another make."""


class SessionError(KafilaError):
    """The session cannot form or go on."""


class RendezvousUnreachable(SessionError):
    """No answer from the rendezvous."""


class UnknownSession(SessionError):
    """The rendezvous knows no such session."""


class WrongSecret(SessionError):
    """The code's secret does not open the session."""


class SessionFull(SessionError):
    """The session already has as many members as its host asked for."""


class MemberLeft(SessionError):
    """Somebody the ring needs has gone."""


class PlanDeclined(SessionError):
    """No division of the model fits the members; the message is the planner's."""


class Unanswered(SessionError):
    """Some of a pipe's questions got no answer; each said why when it happened."""


class ModelError(KafilaError):
    """The checkpoint cannot be served."""


class ModelNotFound(ModelError):
    """No checkpoint where the person pointed."""


class ModelIncomplete(ModelError):
    """A file, tensor or setting of the checkpoint is missing or wrong; the message names it."""


class FetchFailed(ModelError):
    """The checkpoint does not come from its source, or there is no room for it here."""


class SourceSilent(FetchFailed):
    """The source does not answer, or breaks off again and again."""


class UnsupportedModel(ModelError):
    """An architecture we do not implement; the message lists those we do."""


class DeviceError(KafilaError):
    """The device cannot do the work."""


class ProtocolError(KafilaError):
    """A peer sent what the protocol does not allow."""


class SealBroken(ProtocolError):
    """A sealed message was altered, replayed, or made without the secret."""
